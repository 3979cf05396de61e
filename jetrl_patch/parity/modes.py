"""Choose the modes to compare, and check the model before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.config.modes import MODES
from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.places import reading

__all__ = ["BY_DEFAULT", "Job", "check_model", "choose"]

#: compared by default: from no FP8 to FP8 on both sides
BY_DEFAULT = ("bf16", "fp8-rollout", "fp8-unified")
UNIFIED = SETTINGS["precision"].default


@dataclass(frozen=True, kw_only=True)
class Job:
    """One mode of one model, as sent to the process that measures it.

    Attributes:
        model: directory of a Hugging Face checkpoint.
        config: settings of the mode.
        tp: tensor parallel size of the rollout.
        batch: requests per batch.
        tokens: minimum number of response tokens.
        length: tokens per response.
        temperature: sampling temperature, also applied to the log-probs.
        seed: seed of prompts and sampling.
        prompts: text file with one prompt per line, or None.
        engine: further arguments of vLLM's ``LLM``.
        stock: name in ``STOCK``: nothing is enabled, and ``config`` gives the dtype alone.
        cost: whether both sides are timed.
    """

    model: str
    config: Config
    tp: int = 1
    batch: int = 32
    tokens: int = 2048
    length: int = 64
    temperature: float = 1.0
    seed: int = 0
    prompts: str | None = None
    engine: tuple[tuple[str, Any], ...] = ()
    stock: str | None = None
    cost: bool = False

    @property
    def ep(self) -> int:
        """Expert parallel size of the rollout: vLLM's ranks either share every expert or have their own."""
        return self.tp if dict(self.engine).get("enable_expert_parallel") else 1

    @property
    def label(self) -> tuple[str, str]:
        """What the table calls the mode: precision and align."""
        return (self.stock, "stock") if self.stock else (self.config.precision, self.config.resolved_align)

    @property
    def name(self) -> str:
        """What messages call the mode."""
        return f"stock {self.stock}" if self.stock else self.config.precision

    @property
    def promises_equality(self) -> bool:
        """Whether a difference in this mode is a failure."""
        return self.config.exact

    def with_config(self, config: Config) -> Job:
        """The same job in another mode."""
        return replace(self, config=config)


def choose(precisions: list[str], aligns: list[str], granularity: str = "block", **common: Any) -> list[Config]:
    """The modes that the command line selects, or the default ones if it names none.

    ``aligns`` apply to fp8-unified, and select it if no precision is named. ``granularity`` applies to the modes that
    support more than one. Raises ConfigError for unknown or contradictory values.
    """
    if not precisions and not aligns:
        precisions, aligns = [*BY_DEFAULT], ["linear", "exact"]
    elif not precisions:
        precisions = [UNIFIED]
    elif aligns and UNIFIED not in precisions:
        raise ConfigError(
            f"--align {', '.join(aligns)} applies to precision {UNIFIED}, but --precision is {', '.join(precisions)}; "
            f"add {UNIFIED} or remove --align"
        )
    configs = []
    for precision in dict.fromkeys(precisions):
        choices: list[str | None] = [*dict.fromkeys(aligns)] if precision == UNIFIED and aligns else [None]
        for align in choices:
            scales = {"rollout_granularity": granularity} if precision in MODES and MODES[precision].has_granularity else {}
            # the same fixes in every row, so that rows differ by their modes alone
            wanted = Config(precision=precision, align=align, upstream_fixes=True, **scales, **common)  # type: ignore[arg-type]
            configs.append(wanted.resolved())
    return configs


def check_model(path: str, configs: list[Config], tp: int = 1) -> None:
    """Check what can be checked without loading the model.

    Raises:
        ModelError: there is no checkpoint, the model has a vision tower, exact mode does not support its family, or ``tp`` does
            not divide its heads.
    """
    import json
    from types import SimpleNamespace

    file = Path(path) / "config.json"
    if not file.is_file():
        raise ModelError(
            explain(
                f"--model {path}",
                required="the directory of a Hugging Face checkpoint",
                found=f"no {file.name} in it",
                fix="give the path of a local model; nothing is downloaded",
            )
        )
    try:
        with reading(file):
            settings = json.loads(file.read_text())
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ModelError(f"--model {path}: {file.name} is not valid JSON ({error})") from None
    if not any(Path(path).glob("*.safetensors")) and not any(Path(path).glob("*.bin")):
        raise ModelError(
            explain(
                f"--model {path}",
                required="weights (*.safetensors or *.bin)",
                found=f"only {file.name}",
                fix="give a complete checkpoint",
            )
        )
    if "vision_config" in settings:
        raise ModelError(
            explain(
                f"--model {path}",
                required="a text model, whose log-probs are compared on text alone",
                found=f"model_type={settings.get('model_type')!r}, which has a vision_config",
                fix="compare the text model that it is built on",
            )
        )
    _check_heads(path, settings, tp)
    if any(config.exact for config in configs):
        from jetrl_patch.exact.coverage import check_family

        check_family(SimpleNamespace(**settings))


def _check_heads(path: str, settings: dict[str, Any], tp: int) -> None:
    """vLLM gives each rank the same number of attention heads, and whole key/value heads or one copy each."""
    heads = settings.get("num_attention_heads")
    groups = settings.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if tp not in sizes:
        raise ModelError(
            explain(
                f"--tp {tp} with {path}",
                required=f"a size that divides its {heads} attention and {groups} key/value heads",
                found=str(tp),
                fix=f"use one of {', '.join(map(str, sizes))}",
            )
        )
