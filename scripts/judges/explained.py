"""Why a test of others ends differently with the plugin than without it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["EXPLAINED", "reason"]


@dataclass(frozen=True)
class Explained:
    """Patterns of suites and tests, the arms, how the tests end there, and one sentence."""

    suite: str
    test: str
    arms: tuple[str, ...]
    to: str
    why: str


_EXACT = ("exact",)
EXPLAINED = (
    Explained(
        "vLLM determinism*", "*::test_logprobs_without_batch_invariance_should_fail*", _EXACT, "failed",
        "passes only if log-probs depend on the batch, which a stock engine's do and an exact engine's do not",
    ),
    Explained(
        "TRL, vLLM", "*", ("bf16", *_EXACT), "passed",
        "passes; without the plugin vLLM cannot load weights twice on a CPU, where its parameters lose their `weight_loader`",
    ),
    Explained(
        "verl on CPU", "*::test_build_kv_transfer_config_prefill_role_maps_to_kv_producer", ("bf16", *_EXACT), "failed",
        "expects the device cuda on a machine without a GPU; the plugin's platform for CPUs says cpu",
    ),
    Explained(
        "RL-Kernel operators", "*::test_native_swiglu_matches_fp32_reference*", _EXACT, "failed",
        "expects one rounding; SiLU(gate) is rounded to BF16 before the product with up, as in Hugging Face's models",
    ),
    Explained(
        "vLLM determinism*", "*", _EXACT, "passed", "passes with an exact engine; a stock engine's log-probs depend on the batch",
    ),
)  # fmt: skip


def reason(suite: str, arm: str, test: str, to: str) -> str | None:
    """The first explanation why a test ends like ``to`` in this arm, or None."""
    ended = (one for one in EXPLAINED if arm in one.arms and one.to == to)
    return next((one.why for one in ended if fnmatchcase(suite, one.suite) and fnmatchcase(test, one.test)), None)
