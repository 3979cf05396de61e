"""Start the real ``openrlhf.cli.train_ppo_ray`` as a user does, with a small model, and read its log."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from pathlib import Path

from tests.process_run import ProcessRun
from tests.verl.run_verl import make_task as make_verl_task

#: log-probs and the like of a step, as OpenRLHF prints its status
_STATUS = re.compile(r"Global step (\d+): (\{.*\})")


def make_task(folder: Path, family: str = "qwen3", prompts: int = 64, **options: object) -> Path:
    """Write a model with a tokenizer, prompts that differ and a reward in OpenRLHF's form into ``folder``."""
    make_verl_task(folder, family, **options)  # type: ignore[arg-type]
    rows = [{"input": f"{i % 10}+{i // 10}=", "label": "1"} for i in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_func.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    answers = [q[len(p):] for q, p in zip(queries, prompts)]\n"
        "    scores = [sum(c.isdigit() for c in a) / max(1, len(a)) for a in answers]\n"
        "    return {'rewards': scores[0], 'scores': scores[0], 'extra_logs': {}}\n"
    )
    return folder


def arguments(
    folder: Path, *extra: str, actors: int = 1, stage: int = 2, steps: int = 2, checkpoints: bool = False
) -> list[str]:
    """Return arguments of ``train_ppo_ray``: GRPO-like, 4 prompts with 2 samples each per step."""
    return [
        "--actor.model_name_or_path", str(folder / "model"),
        "--reward.remote_url", str(folder / "reward_func.py"),
        "--data.prompt_dataset", str(folder / "prompts.jsonl"), "--data.input_key", "input", "--data.label_key", "label",
        "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "2",
        "--actor.num_nodes", "1", "--actor.num_gpus_per_node", str(actors),
        "--ref.num_nodes", "1", "--ref.num_gpus_per_node", str(actors),
        "--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "1", "--vllm.enforce_eager",
        "--vllm.gpu_memory_utilization", "0.05",
        "--ds.attn_implementation", "sdpa", "--ds.zero_stage", str(stage),
        "--rollout.batch_size", "4", "--rollout.micro_batch_size", "4",
        "--train.batch_size", "8", "--train.micro_batch_size", "4",
        "--data.max_len", "64", "--rollout.max_new_tokens", "16", "--data.max_samples", str(4 * steps),
        "--train.num_episodes", "1", "--train.max_epochs", "1", "--actor.adam.lr", "1e-3",
        "--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "out" / "checkpoints"),
        *([] if checkpoints else ["--ckpt.disable_ds"]), *extra,
    ]  # fmt: skip


class Run(ProcessRun):
    """One run of OpenRLHF: by the launcher, or by a shell script that knows nothing of the plugin."""

    def __init__(
        self, folder: Path, *extra: str, environ: dict[str, str], by_script: bool = False, **options: int
    ) -> None:
        words = [sys.executable, "-m", "jetrl_patch.cli.main", "openrlhf", *arguments(folder, *extra, **options)]
        if by_script:
            words[2:4] = ["openrlhf.cli.train_ppo_ray"]
            (folder / "run.sh").write_text(f"set -x\n{shlex.join(words)}\n")
            words = ["bash", "run.sh"]
        super().__init__(
            folder, lambda ray_dir: (words, {"RAY_TMPDIR": ray_dir, "VLLM_CPU_KVCACHE_SPACE": "1"}), environ
        )

    def metrics(self) -> list[dict[str, float]]:
        """Return the status of each step, which every node of a cluster may print."""
        return [ast.literal_eval(text) for text in dict(_STATUS.findall(self.text)).values()]
