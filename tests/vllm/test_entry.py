"""The entry point: trivial to import, silent unless opted in, safe to call again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from jetrl_patch import session


def test_import_brings_no_framework() -> None:
    code = (
        "import sys; import jetrl_patch.adapters.vllm.entry as e; e.register(); "
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_happens_unless_opted_in() -> None:
    from jetrl_patch.adapters.vllm.entry import register

    register()
    assert not session.is_active()


def test_register_twice_is_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    from jetrl_patch.adapters.vllm.entry import register

    monkeypatch.setenv("JETRL_PRECISION", "fp8-rollout")
    register()
    assert session.is_active()
    assert "jetrl_fp8" in QUANTIZATION_METHODS
    records = len(session.status().patches)
    register()
    assert len(session.status().patches) == records
    session.disable()
    assert "jetrl_fp8" not in QUANTIZATION_METHODS


def test_the_entry_point_is_declared() -> None:
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "jetrl_patch"]
    assert point.value == "jetrl_patch.adapters.vllm.entry:register"


def test_it_asks_no_gpu() -> None:
    """vLLM's delta rule does when it is imported, and so does the choice of a backend. Both are a worker's.

    The process that builds the engine would then take memory of a GPU, and could not be forked.
    """
    code = (
        "import sys; from jetrl_patch.adapters.vllm.entry import register; from jetrl_patch.exact import dispatch; register(); "
        "from vllm.model_executor.custom_op import op_registry_oot as ops; "
        "assert 'RMSNorm' in ops and not dispatch._chosen and not [name for name in sys.modules if '.gdn.qwen' in name]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JETRL_PRECISION": "fp8-unified"})
