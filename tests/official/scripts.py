"""Small scripts in the manner of the frameworks' own, written by the tests."""

from __future__ import annotations

from pathlib import Path

HEAD = "#!/usr/bin/env bash\nset -xeuo pipefail\n"
#: a GRPO launch with variables, arrays and probes as in verl's examples
GRPO = (
    HEAD
    + r"""
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
EXPERIMENT=grpo_$(date +%Y%m%d)
[ "${DEVICE}" = gpu ] || exit 3
export SOME_SWITCH=1
mkdir -p logs
sleep infinity
DATA=(
    data.train_files="['$HOME/data/train.parquet', '$HOME/data/more.parquet']"
    data.max_response_length=$((1024 * 2))
)
LAUNCH=(uv run --frozen --extra vllm python3)
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.rollout.name=vllm \
    trainer.experiment_name=${EXPERIMENT} \
    EXTRA "$@"
"""
)


def grpo(*settings: str, model: str = "Qwen/Qwen3-8B") -> str:
    """A script whose launch has these additional settings."""
    return GRPO.replace("EXTRA", " ".join(settings)).replace("Qwen/Qwen3-8B", model)


def write(folder: Path, **texts: str) -> Path:
    """Write ``examples/<name>.sh`` for each text and return the folder, a checkout."""
    place = folder / "examples" / "some_trainer"
    for name, text in texts.items():
        script = place / f"{name}.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text)
    return folder
