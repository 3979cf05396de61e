"""verl's FSDP engines under torchrun: FP8 training, and the bytes that a sync sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import facts
from tests.models import save

SCRIPT = Path(__file__).with_name("engine_script.py")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", steps=2)


@pytest.fixture(scope="module")
def tied_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tied", "llama", steps=0, tie_word_embeddings=True)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp2", 2),
        ("fsdp", 1),
        pytest.param("fsdp2", 1, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_streams_the_bytes_of_a_direct_quantization(strategy, ranks, model_dir):
    found = facts(SCRIPT, ranks, strategy, model_dir)
    assert found["layers"] == 21
    assert found["tensors"] == len(found["digests"]) and found["gathered"] == [0, 0]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "gathered"), [(1, 0), (2, 15)])
def test_the_fp8_all_gather_changes_no_byte(ranks, gathered, model_dir):
    """One rank has nothing to gather. On two, k and v stay in BF16, because sharding would cut their 128 rows."""
    found = facts(SCRIPT, ranks, "fsdp2", model_dir, "gather")
    assert found.pop("gathered") == [gathered, gathered]
    expected = facts(SCRIPT, ranks, "fsdp2", model_dir)
    assert found == {name: value for name, value in expected.items() if name != "gathered"}


@pytest.mark.e2e
def test_tied_embeddings(tied_dir):
    assert "lm_head.weight" in facts(SCRIPT, 1, "fsdp2", tied_dir)["digests"]
