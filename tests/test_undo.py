"""``enable()`` and ``disable()`` on the real packages: every patched attribute holds its original object again.

Each case runs in a process of its own, because the frameworks stay imported and one case must not prepare the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import importlib, inspect, os, sys
from jetrl_patch import Config, registry
from jetrl_patch import session as runtime
from jetrl_patch.errors import PatchError
from jetrl_patch.registry import Patch
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.patching.journal import raw_entry
from jetrl_patch.patching.patch import find_target
from jetrl_patch.session import plan

ADAPTERS = registry.installed()

def planned(config):
    return plan(config, ADAPTERS).planned

def load_all(configs):
    'Import every module that is patched. verl imports its vLLM parts only where a version of vllm is answered.'
    import importlib.metadata
    from jetrl_patch.adapters.cpu import openrlhf as flash_attn
    from jetrl_patch.patching.journal import Journal
    journal = Journal()
    flash_attn.stand_in(journal)  # without it OpenRLHF cannot be imported here
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.30.0+cpu" if name == "vllm" else real(name)
    try:
        for config in configs:
            for what in planned(config):
                importlib.import_module(what.module)
    finally:
        importlib.metadata.version = real
        journal.rollback()
    # importing has made verl choose a platform, which enable() must come before
    sys.modules["verl.plugin.platform.platform_manager"]._current_platform = None

def places(config):
    'Every attribute that is to be touched, with what stands in its owner now.'
    found = {}
    for what in planned(config):
        if isinstance(what, Patch):
            owner, name, _ = find_target(sys.modules[what.module], what.attr)
            found[what.target] = (owner, name, raw_entry(owner, name))
    return found

def spaces(found):
    'The whole namespaces of the owners: nothing may be added, removed or replaced anywhere in them.'
    owners = {id(owner): owner for owner, _, _ in found.values()}
    return {key: {k: id(v) for k, v in vars(owner).items()} for key, owner in owners.items()}
"""


def run(body: str, **environ: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("JETRL_")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **environ},
        cwd="/",
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_every_attribute_is_the_identical_object_again() -> None:
    said = run("""
        configs = [Config(precision=p).resolved() for p in ("bf16", "fp8-rollout", "fp8-unified")]
        load_all(configs)
        for config in configs:
            found = places(config)
            before, environ = spaces(found), dict(os.environ)
            for _ in range(2):  # a second enable() works as the first
                status = runtime.enable(config)
                assert {p.state for p in status.patches} == {"applied"}, str(status)
                assert {what.target for what in planned(config)} <= {p.target for p in status.patches}
                for target, (owner, name, raw) in found.items():
                    assert raw_entry(owner, name) is not raw, target
                runtime.disable()
                for target, (owner, name, raw) in found.items():
                    assert raw_entry(owner, name) is raw, target
                assert spaces(found) == before
                assert dict(os.environ) == environ

        # and the same when a patch fails after all the real ones are in
        class Last(registry.Adapter):
            name, order = "json", 99
            def patches(self, config):
                def make(original): raise RuntimeError("in the middle")
                return [Patch(module="json", attr="dumps", make=make, reason="", remove_when="")]

        theirs = registry.adapters()
        registry.adapters = lambda: (*theirs, Last())
        try:
            runtime.enable(config)
        except PatchError as error:
            assert "in the middle" in str(error), error
        else:
            raise AssertionError("it went through")
        assert not runtime.is_active()
        assert spaces(found) == before
        assert dict(os.environ) == environ
        print(len(found))
    """)
    assert int(said) >= 10


@pytest.mark.slow
def test_enabled_first_and_imported_later_comes_to_the_same() -> None:
    said = run("""
        config = Config().resolved()
        runtime.enable(config)
        loaded = {name for name in ("vllm", "verl", "transformers", "ray") if name in sys.modules}
        assert not loaded, loaded
        for what in planned(config):
            importlib.import_module(what.module)
        assert {p.state for p in runtime.status().patches} == {"applied"}, str(runtime.status())
        ours = {target: raw for target, (_, _, raw) in places(config).items()}
        runtime.disable()
        after = places(config)
        assert all(after[target][2] is not raw for target, raw in ours.items())
        print("well")
    """)
    assert said == "well"


def test_every_patch_says_why_it_is_here_and_when_it_may_go() -> None:
    said = run("""
        for precision in ("bf16", "fp8-rollout", "fp8-unified"):
            for platform in ("cpu", "cuda"):
                for what in planned(Config(precision=precision, platform=platform).resolved()):
                    assert len(what.reason) > 15, what
                    assert what.remove_when or not isinstance(what, Patch), what
        print("well")
    """)
    assert said == "well"
