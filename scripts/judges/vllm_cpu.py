"""A pytest plugin for vLLM's determinism tests on a CPU, outside their tree.

They run where vLLM finds a GPU, and ask for invariance by a variable of vLLM's own, whose kernels need one too. Here they run
with the CPU's attention, and whether an engine is exact is decided by the plugin's variables alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

_BACKEND, _TOWER = "CPU_ATTN", "TORCH_SDPA"
_VARIABLE = "VLLM_BATCH_INVARIANT"
#: the fixture of their ``conftest.py`` that sets the variable
_THEIRS = "enable_batch_invariant_mode"


def pytest_configure(config: pytest.Config) -> None:
    folder = str(Path(config.args[0]).resolve().parent)
    sys.path.insert(0, folder)
    import vllm.config  # before their module, which else imports vLLM in a circle

    import utils  # type: ignore[import-not-found]  # isort: skip

    vllm.LLM = _on_a_cpu(vllm.LLM)  # type: ignore[assignment, misc]
    utils.BACKENDS = [_BACKEND]
    utils.skip_unsupported = utils.skip_if_not_cuda = pytest.mark.skipif(False, reason="runs on a CPU")


def _on_a_cpu(engine: Any) -> Any:
    """A constructor of engines whose vision towers have the only attention there is on a CPU."""

    def build(*args: Any, **kwargs: Any) -> Any:
        tower = {"mm_encoder_attn_backend": _TOWER} if "mm_encoder_attn_backend" in kwargs else {}
        return engine(*args, **{**kwargs, **tower})

    return build


@pytest.fixture(autouse=True)
def _engine_decides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs

    request.getfixturevalue(_THEIRS)
    monkeypatch.delenv(_VARIABLE)
    monkeypatch.setattr(vllm.envs, _VARIABLE, False)
