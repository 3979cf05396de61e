"""Ulysses sequence parallelism: ranks that hold slices of sequences compute the bits of one rank that holds them whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import facts
from tests.fp8.thresholds import SQNR_MODEL_GRADIENT
from tests.models import save

HERE = Path(__file__).parent


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("align", "variants"),
    [
        ("exact", ("qwen3", "qwen3-tied")),  # two key/value heads for two ranks, and one, which both need
        pytest.param("exact", ("qwen2", "llama3-rope", "smollm3", "granite"), marks=pytest.mark.slow),
        pytest.param("linear", ("qwen3", "qwen3-tied"), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_against_one_and_against_fp64(align, variants):
    """Gradients differ from one rank's in the groups of 128 tokens of WGrad; both are held to the bound against FP64."""
    found = facts(HERE / "exchange_script.py", 2, align, *variants)
    assert len(found) == 2 * len(variants)
    for name, case in found.items():
        assert case["tokens"] == 296
        assert align != "exact" or case["unequal"] == 0, (name, case)
        assert case["fp64"] > SQNR_MODEL_GRADIENT[name.split()[1]], (name, case)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", steps=2)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp2", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 4, marks=pytest.mark.slow),
        pytest.param("fsdp", 4, marks=pytest.mark.slow),
    ],
)
def test_verls_engines_score_as_one_rank_does(strategy, ranks, model_dir):
    """The actor before and after training, its entropy, and the reference model; on four ranks FSDP shards over two pairs."""
    for found in facts(HERE / "ulysses_script.py", ranks, strategy, model_dir, "exact"):
        assert found.pop("learned")["unequal"] > 0
        assert found.keys() == {"actor 1", "actor 4", "entropy", "reference 1", "reference 4", "trained"}
        assert all(case == {"unequal": 0, "max": 0.0} for case in found.values()), found
