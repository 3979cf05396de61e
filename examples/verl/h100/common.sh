# Shared by the scripts of this folder, which set NAME, MODEL and RESPONSE and source this file.
#
# GRPO on GSM8K and MATH in unified FP8 on one node of 8 H100. The models and rollout lengths are those of Jet-RL
# (arXiv 2601.14243), which does not publish learning rates and batch sizes; those here are common values. The settings are the
# recommended ones (docs/configuration.md). No script of this folder has run on a GPU yet: do docs/ten-minutes.md first.
#
#   DATA       folder with gsm8k/ and math/; `python -m examples.gsm8k` and `python -m examples.competition_math` write it
#   MODEL      folder of the model
#   OUTPUT     folder for checkpoints; by default one for each precision and alignment, because a run resumes what is in it
#   GPUS, TP   GPUs of the node; GPUs of one vLLM engine
#   PRECISION  another mode for comparison: bf16 or fp8-rollout
#   ALIGN      linear, for a model family without exact mode
#   LOGGER     verl's loggers, such as '["console","wandb"]'
#   JETRL      the command to run; "jetrl doctor -- jetrl" checks instead
#
# The script's arguments are hydra overrides for verl. They follow those set here and win.
set -euo pipefail

DATA=${DATA:-$HOME/data}
RUN=$NAME-${PRECISION:-fp8-unified${ALIGN:+-$ALIGN}}
OUTPUT=${OUTPUT:-outputs/$RUN}
GPUS=${GPUS:-8}
TP=${TP:-2}  # the best of the estimates in docs/scaling.md
PROMPT=1024
LENGTH=$((PROMPT + RESPONSE))

LOGGER=${LOGGER:-'["console"]'}

mode=(--fp8-unified --set decode_graphs=true)
if [[ -n ${PRECISION:-} ]]; then
  mode=(--precision "$PRECISION")
elif [[ -n ${ALIGN:-} ]]; then
  mode=(--fp8-unified --align "$ALIGN")
fi

exec ${JETRL:-jetrl} verl "${mode[@]}" \
  algorithm.adv_estimator=grpo \
  data.train_files="['$DATA/gsm8k/train.parquet','$DATA/math/train.parquet']" \
  data.val_files="['$DATA/gsm8k/test.parquet','$DATA/math/test.parquet']" \
  data.train_batch_size=128 \
  data.max_prompt_length=$PROMPT \
  data.max_response_length="$RESPONSE" \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
  actor_rollout_ref.ref.fsdp_config.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * LENGTH)) \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size="$TP" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.max_model_len=$LENGTH \
  actor_rollout_ref.rollout.max_num_batched_tokens=$LENGTH \
  trainer.n_gpus_per_node="$GPUS" \
  trainer.nnodes=1 \
  trainer.total_epochs=2 \
  trainer.save_freq=50 \
  trainer.test_freq=10 \
  trainer.logger="$LOGGER" \
  trainer.project_name=jetrl_patch \
  trainer.experiment_name="$RUN" \
  trainer.default_local_dir="$OUTPUT" \
  "$@"
