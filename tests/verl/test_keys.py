"""Every setting of verl's programs is handled, refused or harmless, and has been reviewed.

Handled: a check of the plugin reads it, or the plugin sets it. Refused: it has a rule. Harmless: ``scripts/official/keys.py``
or ``adapters/verl/rollout.py`` says why. ``keys.txt`` lists the settings that have been looked at. One that a new version
of verl adds is missing there: look at the code that reads it, give it a rule or a reason, and add its name.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import jetrl_patch.adapters.verl
from jetrl_patch import registry
from jetrl_patch.adapters.verl import rollout, settings
from jetrl_patch.config import Config
from jetrl_patch.patching.guards import file_of
from jetrl_patch.trainer.rules import Rule
from scripts.official import keys
from tests.models import config_of

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LIST = Path(__file__).with_name("keys.txt")
UNIFIED = Config(precision="fp8-unified")
MODES = [
    UNIFIED, UNIFIED.replace(align="linear"), UNIFIED.replace(measure_routes=True), UNIFIED.replace(correction="tis"),
    UNIFIED.replace(fp8_all_gather=True), UNIFIED.replace(optimizer_states="8bit"), UNIFIED.replace(old_log_probs="rollout"),
    UNIFIED.replace(decode_graphs=False),
    Config(precision="fp8-rollout"), Config(precision="bf16"), Config(precision="fp16"),
]  # fmt: skip
#: sections that a check reads as a whole, and refuses what it does not know there
WHOLE = (f"{R}.engine_kwargs.vllm", f"{M}.override_config", "algorithm.rollout_correction")
#: what makes the checks read more
MORE = (f"{A}.use_kl_loss=True", f"{M}.lora_rank=8", f"{M}.use_fused_kernels=True", "distillation.enabled=True")


def composed(program: str, folder: Path, *more: str) -> Any:
    """The configuration of one of verl's programs, as it starts."""
    place, _, _ = program.rpartition(".")
    config = file_of("verl", *place.split(".")[1:], "config")
    assert config is not None
    search = f"hydra.searchpath=[file://{file_of('verl', 'trainer', 'config')}]"
    needed = [f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1", f"{M}.path={folder}", f"{A}.ppo_micro_batch_size_per_gpu=1"]
    with initialize_config_dir(str(config), version_base=None):
        return compose(settings.TRAINERS[program], [search, *needed, *more])


def leaves(path: str, value: Any) -> Iterator[str]:
    """The settings below a path. Hydra's own begin with an underscore."""
    if isinstance(value, dict) and value:
        for name, below in value.items():
            if not str(name).startswith("_"):
                yield from leaves(f"{path}.{name}" if path else str(name), below)
    else:
        yield path


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[set[str], set[str]]]:
    """The settings of all programs, and the paths that the plugin reads or sets."""
    folder = tmp_path_factory.mktemp("model")
    config_of("qwen3").save_pretrained(folder)
    kept, select, handled = GlobalHydra.instance().hydra, OmegaConf.select, set()
    GlobalHydra.instance().clear()

    def noted(config: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        handled.add(path)
        return select(config, path, *args, **kwargs)

    names: set[str] = set()
    try:
        OmegaConf.select = staticmethod(noted)  # type: ignore[assignment]
        for program in settings.TRAINERS:
            whole = composed(program, folder)
            names |= set(leaves("", OmegaConf.to_container(whole, resolve=False)))
            first = program == registry.programs()["verl"]
            for verl_config in (whole, *(composed(program, folder, more) for more in MORE if first)):
                for mode in MODES if verl_config is whole and first else MODES[:1]:
                    settings.chosen(verl_config, mode)
                    list(settings.problems(verl_config, mode))
                    settings.complete(copy.deepcopy(verl_config), mode)
        yield names, handled
    finally:
        OmegaConf.select = staticmethod(select)  # type: ignore[assignment]
        GlobalHydra.instance().hydra = kept


def refused() -> set[str]:
    """The settings that have a rule, in any module of the adapter."""
    package = jetrl_patch.adapters.verl
    names = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "entry"]  # which patches verl
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    tables = [value for module in modules for value in vars(module).values() if isinstance(value, tuple)]
    return {rule.path for table in tables for rule in table if isinstance(rule, Rule)}


def test_a_new_setting_of_verl_is_looked_at(found: tuple[set[str], set[str]]) -> None:
    names, known = found[0], set(LIST.read_text().split())
    assert not names - known, f"new: {sorted(names - known)}"
    assert not known - names, f"gone: {sorted(known - names)}"


def test_every_setting_is_handled_refused_or_harmless(found: tuple[set[str], set[str]]) -> None:
    names, handled = found
    rules = refused()
    verdicts: dict[str, str] = {}
    for name in names:
        harmless = rollout.HARMLESS.get(name) or keys.harmless("verl", name)
        read = name in handled or name.startswith(WHOLE)
        verdicts[name] = "refused" if name in rules else "handled" if read else harmless and "harmless"
    counts = {kind: list(verdicts.values()).count(kind) for kind in ("refused", "handled", "harmless")}
    print(counts)
    assert not [name for name, verdict in verdicts.items() if not verdict]
    assert min(counts.values()) > 20
