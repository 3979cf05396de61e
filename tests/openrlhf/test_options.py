"""The plugin reads every option of OpenRLHF's parser, or the option is harmless for a stated reason. A new one fails here."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jetrl_patch.adapters.openrlhf import launch
from jetrl_patch.config import Config
from tests import vision_models
from tests.models import config_of

ADAPTER = Path(launch.__file__ or "").parent

#: modes, corrections and settings that make the checks read more
CONFIGS = [
    Config(), Config(align="linear"), Config(precision="fp8-rollout"), Config(precision="bf16"), Config(precision="fp16"),
    Config(correction="tis"), Config(optimizer_states="8bit"), Config(precision="bf16", head_dtype="float32"),
]  # fmt: skip

#: reason -> options for which the plugin does nothing, because neither a log-prob nor what a sync sends depends on them
HARMLESS = {
    "which samples are drawn and in what order; each is compared, whatever it is": """
        data.prompt_probs data.prompt_split data.max_samples data.input_key data.label_key data.input_template data.image_key
        data.apply_chat_template data.disable_fast_tokenizer data.dataloader_num_workers train.seed train.num_episodes
        algo.dynamic_filtering_enable algo.dynamic_filtering_range rollout.batch_size rollout.n_samples_per_prompt""",
    "how long a sample gets: a log-prob does not depend on what follows it": "data.max_len rollout.max_new_tokens",
    "an older sample that waits carries the version of its weights": "train.async_queue_size rollout.vllm_generate_batch_size",
    "which samples stand beside each other: a row has the same bits in every batch": """
        train.micro_batch_size train.max_tokens_per_gpu rollout.micro_batch_size
        rollout.max_tokens_per_gpu""",
    "the loss, which comes after the log-probs and their comparison": """
        actor.eps_clip actor.eps_clip_low_high actor.dual_clip actor.loss_agg_mode actor.entropy_coef actor.aux_loss_coef
        algo.advantage.estimator algo.advantage.gamma algo.advantage.lambd algo.advantage.no_std_norm algo.kl.estimator
        algo.kl.horizon algo.kl.target algo.kl.unbiased_gradient algo.kl.use_loss train.max_epochs""",
    "scores, which do not depend on the policy's weights": """
        reward.clip_range reward.normalize_enable reward.offload reward.overlong_buffer_len reward.overlong_penalty_factor
        reward.stop_properly_penalty_coef""",
    "the critic, which stays as OpenRLHF builds it": """
        critic.value_clip critic.save_value_network critic.adam.lr critic.adam.betas critic.adam.eps critic.adam.weight_decay
        critic.muon.lr critic.muon.momentum critic.muon.ns_steps critic.muon.nesterov critic.lr_scheduler
        critic.lr_warmup_ratio critic.min_lr_ratio critic.max_norm ds.value_head_prefix""",
    "what an optimizer step writes; both sides get what it has written": """
        actor.adam.lr actor.adam.betas actor.adam.eps actor.adam.weight_decay actor.muon.lr actor.muon.momentum
        actor.muon.ns_steps actor.muon.nesterov actor.lr_scheduler actor.lr_warmup_ratio actor.min_lr_ratio actor.max_norm
        ds.overlap_comm""",
    "forward again in the backward pass, with the same bits (tests/fp8/test_training.py)": """
        actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant""",
    "where and when bytes are kept or gathered; a gathered weight has the bits of its parts": """
        ds.zpg ref.offload ds.enable_sleep local_rank""",
    "a copy of the policy, converted like it, from which nobody samples": "train.ema_beta",
    "frozen or not, a quantized sync sends every tensor; OpenRLHF's own sends what is trained": "actor.freeze_visual_encoder",
    "replaced by the plugin's own where the experts are FP8": "ds.experts_implementation",
    "the shape of the adapters; the actors check what peft has built": "ds.lora.alpha ds.lora.target_modules",
    "only with ring attention, which is refused where a bit depends on it": "ds.ring_attn_head_stride",
    "torch's deterministic kernels, of which the plugin's operations need none": "train.full_determinism_enable",
    "how tensors travel; digests prove what arrives": "vllm.sync_backend",
    "a prefix whose keys and values are old is dropped at the end of a sync": "vllm.enable_prefix_caching",
    "samples that train nothing": "eval.temperature eval.n_samples_per_prompt eval.steps eval.split",
    "what is written and when; the record of the settings stands beside each of DeepSpeed's checkpoints": """
        ckpt.output_dir ckpt.save_steps ckpt.save_hf ckpt.disable_ds ckpt.max_num ckpt.max_mem ckpt.best_metric_key""",
    "what is logged": """
        logger.logging_steps logger.tensorboard_dir logger.wandb.key logger.wandb.org logger.wandb.group
        logger.wandb.project logger.wandb.run_name""",
    "where a model comes from; actors check what they have loaded": "use_ms",
}


#: additional settings of a command: a file that scores, or models on their own devices and a checkpoint; adapters
COMMANDS = (
    ["--reward.remote_url", "reward.py", "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4"],
    ["--reward.model_name_or_path", "some/reward-model", "--ckpt.load_enable", "--ds.lora.rank", "8"],
)


def options(model: Path, *extra: str) -> Any:
    """OpenRLHF's default arguments, except for those that its checks require."""
    return launch.read(["--actor.model_name_or_path", str(model), "--vllm.num_engines", "1", *extra])


def leaves(args: SimpleNamespace, at: str = "") -> Iterator[str]:
    for name, value in vars(args).items():
        if isinstance(value, SimpleNamespace):
            yield from leaves(value, f"{at}{name}.")
        else:
            yield at + name


class Recorder:
    """A namespace that records which of its leaves are read or written."""

    def __init__(self, args: Any, seen: set[str], at: str = "") -> None:
        self.__dict__.update(_args=args, _seen=seen, _at=at)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._args, name)
        if isinstance(value, SimpleNamespace):
            return Recorder(value, self._seen, f"{self._at}{name}.")
        self._seen.add(self._at + name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._seen.add(self._at + name)
        setattr(self._args, name, value)


def read_by_the_driver(folder: Path) -> set[str]:
    """What the checks, the completion and the doctor read in any mode, for a text model and for a vision-language model."""
    seen: set[str] = set()
    for family, config in itertools.product(("qwen3", "qwen2_5_vl"), CONFIGS):
        model = folder / family
        if not model.exists():
            make = vision_models.config_of if family == "qwen2_5_vl" else config_of
            make(family).save_pretrained(model)
        for extra in COMMANDS:
            recorded = Recorder(options(model, *extra), seen)
            list(launch.problems(recorded, config))
            launch.complete(recorded, config)
            launch.needs(recorded)
            launch.needs_flash_attn(recorded)
            launch.model_path(recorded)
    return seen


def read_by_actors() -> set[str]:
    """What the adapter's code reads as ``args.section.name``, or by ``getattr`` with a name."""
    text = "\n".join(path.read_text() for path in ADAPTER.glob("*.py"))
    text = text.replace(inspect.getsource(launch.saves), "")  # what the doctor only shows is not handled by that
    found = set(re.findall(r"\bargs\.([a-z_]+(?:\.[a-z_0-9]+)+)", text))
    return found | {f"{section}.{name}" for section, name in re.findall(r"\bargs\.([a-z_.]+), \"([a-z_]+)\"", text)}


def harmless() -> list[str]:
    return [name for names in HARMLESS.values() for name in names.split()]


def test_every_option_is_read_or_harmless(tmp_path: Path) -> None:
    config_of("qwen3").save_pretrained(tmp_path / "model")
    every = set(leaves(options(tmp_path / "model", *COMMANDS[0])))
    read = every & (read_by_the_driver(tmp_path) | read_by_actors())
    assert every - read - set(harmless()) == set(), "examine these: handle them, refuse them, or say why they are harmless"
    assert set(harmless()) - every == set(), "OpenRLHF has them no longer"
    assert set(harmless()) & read == set(), "the plugin reads them, so no reason is needed"
    assert len(harmless()) == len(set(harmless()))
