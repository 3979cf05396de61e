"""What ``enable()`` reads and what stops it: environment, settings, versions, threads, missing adapters."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from jetrl_patch import session
from jetrl_patch.config import environment as env
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError, VersionError
from jetrl_patch.patching import guards
from jetrl_patch.registry import Config, Journal
from tests.patching.fakes import ALL, Fake


def test_opting_in_by_the_environment(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Fake(ALL))
    assert session.activate_from_env() is False
    assert not session.is_active()
    monkeypatch.setenv("JETRL_PRECISION", "fp8-rollout")
    assert session.activate_from_env() is True
    assert session.active_config() == Config(precision="fp8-rollout")
    monkeypatch.setenv("JETRL_PRECISION", "bf16")
    assert session.activate_from_env() is True  # the active session takes precedence
    assert session.active_config() == Config(precision="fp8-rollout")
    monkeypatch.setenv("JETRL_PRECISION", "fp8-rollout")
    session.disable()
    monkeypatch.setenv(env.SWITCH, "0")
    assert session.activate_from_env() is False


def test_the_off_switch_is_stronger_than_a_script(
    use: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = Fake(ALL)
    use(adapter)
    monkeypatch.setenv(env.SWITCH, "0")
    assert not session.enable(precision="fp8-unified").enabled
    assert not session.is_active() and adapter.calls == []
    assert caplog.messages == ["jetrl_patch: JETRL_ENABLED=0 in the environment, so enable() changes nothing"]


def test_enable_starts_from_the_environment(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(Fake(ALL))
    monkeypatch.setenv("JETRL_SCALE_FORMAT", "fp32")
    session.enable(precision="fp8-rollout")
    assert session.active_config() == Config(precision="fp8-rollout", scale_format="fp32")


def test_settings_that_are_wrong_change_nothing(use: Any, environment: dict[str, str]) -> None:
    adapter = Fake(ALL)
    use(adapter)
    for overrides in ({"precision": "fp9"}, {"precison": "bf16"}, {"precision": "bf16", "align": "exact"}):
        with pytest.raises(ConfigError):
            session.enable(**overrides)
    for config in ("fp8-unified", {"precision": "bf16"}):
        with pytest.raises(ConfigError, match=r"a Config or single settings by name, found .*precision='fp8-"):
            session.enable(config)  # type: ignore[arg-type]
    assert adapter.calls == []


def test_enable_from_inside_an_enable_that_is_under_way(use: Any) -> None:
    class Nested(Fake):
        def on_apply(self, config: Config, journal: Journal) -> None:
            assert session.activate_from_env() is True  # as a plugin that loads at this moment does
            session.enable(config)
            with pytest.raises(ConflictError, match=r"required sync_timeout=1\.0, found sync_timeout=300\.0\. Call"):
                session.enable(config, sync_timeout=1.0)

    use(Nested(ALL))
    session.enable()
    assert session.is_active()


def test_two_threads_enable_once(use: Any) -> None:
    adapter = Fake(ALL)
    use(adapter)
    threads = [threading.Thread(target=session.enable) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert adapter.calls.count("on_apply") == 1


def test_layers_and_backend_are_reported(use: Any) -> None:
    use(Fake(ALL))
    session.enable()
    assert session.status().backend == "auto"
    session.register(layers=["layers.0.q_proj", "layers.0.k_proj"])
    session.register(layers=["layers.0.k_proj", "layers.1.q_proj"])
    session.register(backend="native")
    status = session.status()
    assert status.layers == ("layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj")
    assert status.backend == "native"
    assert status.pid == os.getpid()
    assert status.as_dict()["config"]["precision"] == "fp8-unified"
    session.disable()
    session.enable()
    assert session.status().layers == ()


def test_require_active(use: Any) -> None:
    use(Fake(ALL))
    with pytest.raises(NotPatchedError, match=rf"the worker \(pid {os.getpid()}\): required .*, found an unpatched one"):
        session.require_active("the worker")
    with pytest.raises(NotPatchedError):
        session.active_config()
    session.enable()
    assert session.require_active("the worker", Config()) == Config().resolved()
    with pytest.raises(ConflictError, match="settings of the worker"):
        session.require_active("the worker", Config(precision="bf16"))


def test_nothing_to_patch_is_an_error(use: Any) -> None:
    class Nowhere(Fake):
        name = "no_such_framework"

    use(Nowhere())
    with pytest.raises(VersionError, match=r"none of them installed.*pip install 'verl\[vllm\]'`"):
        session.enable()


@pytest.mark.parametrize(
    ("dist", "found"),
    [("torch", "2.10.1"), ("torch", "2.14.0"), ("vllm", "0.23.0"), ("verl", "0.8.0"), ("verl", "main")],
)
def test_unsupported_versions_stop_before_anything_changes(
    use: Any, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, dist: str, found: str
) -> None:
    class Needs(Fake):
        requires = ("torch", "vllm", "verl")

    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda name: found if name == dist else real(name))
    adapter = Needs(ALL)
    use(adapter)
    required = guards.SUPPORTED[dist][0]
    with pytest.raises(VersionError, match=rf"{dist}: required version {required}, found .*{found}.*\. Install {dist}"):
        session.enable()
    assert adapter.calls == [] and session.status().failure.startswith(f"VersionError: {dist}: required version")
