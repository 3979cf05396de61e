"""verl's FSDP engines under torchrun in FP16: the loss scale across ranks, the FP16 stream, and the errors that end a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forks
from tests.models import save

SCRIPT = Path(__file__).with_name("fp16_engine_script.py")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("fsdp2", 1), *(pytest.param(*rest, marks=pytest.mark.slow) for rest in (("fsdp2", 2), ("fsdp", 1), ("fsdp", 2)))],
)
def test_the_loss_scale_and_the_stream(strategy, ranks, tmp_path):
    model = save(tmp_path / "qwen3", "qwen3", steps=0)
    done = forks.run(SCRIPT, strategy, str(model), ranks=ranks)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "FACTS fine" in done.stdout
