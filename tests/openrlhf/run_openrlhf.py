"""Start the real ``openrlhf.cli.train_ppo_ray`` as a user does, with a small model, and read its log."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.verl.run_verl import make_task as make_verl_task

#: log-probs and the like of a step, as OpenRLHF prints its status
_STATUS = re.compile(r"Global step (\d+): (\{.*\})")


def make_task(folder: Path, family: str = "qwen3", **options: object) -> Path:
    """A model with a tokenizer, prompts and a reward in OpenRLHF's form, in ``folder``."""
    make_verl_task(folder, family, **options)  # type: ignore[arg-type]
    rows = [{"input": f"{i % 10}+{i // 10}=", "label": "1"} for i in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_func.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    answers = [q[len(p):] for q, p in zip(queries, prompts)]\n"
        "    scores = [sum(c.isdigit() for c in a) / max(1, len(a)) for a in answers]\n"
        "    return {'rewards': scores[0], 'scores': scores[0], 'extra_logs': {}}\n"
    )
    return folder


def arguments(folder: Path, *extra: str, actors: int = 1, stage: int = 2, steps: int = 2) -> list[str]:
    """Of ``train_ppo_ray``: GRPO-like, 4 prompts with 2 samples each a step."""
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
        "--ckpt.output_dir", str(folder / "out"), "--ckpt.path", str(folder / "out" / "checkpoints"), "--ckpt.disable_ds",
        *extra,
    ]  # fmt: skip


class Run:
    """One run in a process group of its own; its output so far is ``text``."""

    def __init__(self, folder: Path, *extra: str, environ: dict[str, str], **options: int) -> None:
        self._ray_dir = tempfile.TemporaryDirectory(prefix="jo", dir="/tmp", ignore_cleanup_errors=True)
        self.log = folder / f"log-{time.monotonic_ns()}.txt"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "VERL_", "VLLM_CPU_KV"))}
        defaults = {
            "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "RAY_TMPDIR": self._ray_dir.name,
            "RAY_memory_monitor_refresh_ms": "0", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "jetrl_patch.cli.main", "openrlhf", *arguments(folder, *extra, **options)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, env={**clean, **defaults, **environ}, cwd=folder, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            self.stop()

    def wait_for(self, seen: Callable[[str], bool], timeout: float) -> None:
        end = time.monotonic() + timeout
        while not seen(self.text):
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < end, self.text[-4000:]
            time.sleep(0.5)

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self._ray_dir.cleanup()

    def metrics(self) -> list[dict[str, float]]:
        """The status of each step; each node of a cluster may have printed it."""
        return [ast.literal_eval(text) for text in dict(_STATUS.findall(self.text)).values()]
