"""Start the real verl trainer as a user does, with a small model, and read its log."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from jetrl_patch.adapters.cpu.verl import cpu_overrides
from tests.process_run import ProcessRun

R, A, M = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"


def make_task(
    folder: Path, family: str = "qwen3", fill: bool = False, tokens: tuple[str, ...] = (), prompts: int = 32, **options: object
) -> Path:
    """Write a model, a tokenizer as wide as its vocabulary (``fill``) or narrower, prompts and a reward into ``folder``.

    Args:
        tokens: what the tokenizer has too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    from tests.models import save

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate(["<|endoftext|>", "<|im_end|>", "<|im_start|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=512,
    )
    fast.add_tokens(list(tokens))
    if fill:
        fast.add_tokens([f"<|unused{i}|>" for i in range(384 - len(fast))])
    fast.chat_template = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}="
    save(folder / "model", family, steps=3, **options)  # vocabulary 384: wider than the tokenizer's 259
    fast.save_pretrained(folder / "model")
    GenerationConfig(eos_token_id=1, pad_token_id=0).save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "toy", "prompt": [{"role": "user", "content": f"{i % 10}+{i // 10}"}], "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": i},
        }
        for i in range(prompts)
    ]  # fmt: skip
    write_data(folder, rows)
    return folder


def write_data(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write verl's prompts, and a reward for digits."""
    import pandas

    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):\n"
        "    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))\n"
    )


def command(
    folder: Path, ray_dir: str, *extra: str, strategy: str = "fsdp2", processes: int = 1, steps: int = 2,
    program: str = "verl.trainer.main_ppo",
) -> list[str]:
    own = [f"{A}.strategy={strategy}", f"{A}.fsdp_config.strategy={strategy}"]
    own += [f"actor_rollout_ref.ref.fsdp_config.strategy={strategy}"]
    cpu = cpu_overrides(processes)
    if strategy == "veomni":
        cpu = [override for override in cpu if "fsdp_config" not in override]
        own = ["model_engine=veomni", f"{M}.use_remove_padding=True"]
        own += [f"{A}.veomni.attn_implementation=sdpa", f"{A}.veomni.moe_implementation=eager"]
    if strategy == "megatron":
        cpu = [override for override in cpu if "fsdp_config" not in override and "override_config" not in override]
        own = ["model_engine=megatron"]
    return [
        sys.executable, "-m", program, *cpu, *own,
        "algorithm.adv_estimator=grpo", f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet",
        "data.train_batch_size=4", "data.max_prompt_length=32", "data.max_response_length=16",
        f"{M}.path={folder}/model", f"{M}.enable_gradient_checkpointing=False",
        f"{A}.optim.lr=1e-3", f"{A}.ppo_mini_batch_size=4", f"{A}.ppo_micro_batch_size_per_gpu=4",
        f"{R}.name=vllm", f"{R}.n=4", f"{R}.tensor_model_parallel_size={processes}",
        f"{R}.log_prob_micro_batch_size_per_gpu=8", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"{R}.max_model_len=64", f"{R}.max_num_batched_tokens=512", f"{R}.max_num_seqs=16",
        f"reward.custom_reward_function.path={folder}/reward.py", "reward.custom_reward_function.name=compute_score",
        "trainer.val_before_train=False", "trainer.logger=[console]", f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=5", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints", f"+ray_kwargs.ray_init._temp_dir={ray_dir}", *extra,
    ]  # fmt: skip


class Run(ProcessRun):
    """One run of verl."""

    def __init__(self, folder: Path, *extra: str, environ: dict[str, str], **options: object) -> None:
        def start(ray_dir: str) -> tuple[list[str], dict[str, str]]:
            return command(folder, ray_dir, *extra, **options), {"HYDRA_FULL_ERROR": "1"}  # type: ignore[arg-type]

        super().__init__(folder, start, environ)

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each step's log line."""
        steps = []
        for line in self.text.splitlines():
            if "step:" in line and "training/global_step" in line:
                found = re.findall(r"(jetrl/[\w./]+|critic/rewards/mean|training/global_step):([^ ]+)", line)
                steps.append({name: _number(value) for name, value in found})
        return steps


def assert_identity(step: dict[str, float]) -> None:
    """Assert that a correction found nothing to correct."""
    assert step["jetrl/bit_equal_fraction"] == 1.0
    for name in ("min", "mean", "max"):
        assert step[f"jetrl/correction_weight_{name}"] == 1.0
    assert step["jetrl/masked_fraction"] == step["jetrl/clipped_fraction"] == 0.0 and step["jetrl/ess"] == 1.0


def _number(value: str) -> float:
    return float(re.sub(r"^np\.\w+\((.*)\)$", r"\1", value))
