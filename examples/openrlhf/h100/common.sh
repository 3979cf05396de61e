# Shared by the scripts of this folder, which set NAME, MODEL and RESPONSE and source this file.
#
# GRPO on GSM8K and MATH in unified FP8 on one node of 8 H100, trainer and vLLM on the same GPUs. The models and rollout lengths
# are those of Jet-RL (arXiv 2601.14243), which does not publish learning rates and batch sizes; those here are common values. The
# settings are the recommended ones (docs/configuration.md). No script of this folder has run on a GPU yet: do
# docs/ten-minutes.md first. Packed samples need flash-attn.
#
#   DATA       folder with gsm8k/ and math/; `python -m examples.gsm8k` and `python -m examples.competition_math` write it
#   PROMPTS    instead of DATA: files of JSON lines with "input" (the question) and "label" (the answer), joined by commas
#   MODEL      folder of the model
#   REWARD     Python file with reward_func(queries, prompts, labels)
#   OUTPUT     folder for checkpoints; by default one for each precision and alignment
#   GPUS, TP   GPUs of the node; GPUs of one vLLM engine
#   PRECISION  another mode for comparison: bf16 or fp8-rollout
#   ALIGN      linear, for a model family without exact mode
#   JETRL      the command to run; "jetrl doctor -- jetrl" checks instead
#
# The script's arguments follow those set here and override them.
set -euo pipefail

DATA=${DATA:-$HOME/data}
PROMPTS=${PROMPTS:-$DATA/gsm8k/train.jsonl,$DATA/math/train.jsonl}
REWARD=${REWARD:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/reward.py}
RUN=$NAME-${PRECISION:-fp8-unified${ALIGN:+-$ALIGN}}
OUTPUT=${OUTPUT:-outputs/$RUN}
GPUS=${GPUS:-8}
TP=${TP:-2}  # the best of the estimates in docs/scaling.md
LENGTH=$((1024 + RESPONSE))

mode=(--fp8-unified --set decode_graphs=true)
if [[ -n ${PRECISION:-} ]]; then
  mode=(--precision "$PRECISION")
elif [[ -n ${ALIGN:-} ]]; then
  mode=(--fp8-unified --align "$ALIGN")
fi

exec ${JETRL:-jetrl} openrlhf "${mode[@]}" \
  --actor.model_name_or_path "$MODEL" \
  --reward.remote_url "$REWARD" \
  --data.prompt_dataset "$PROMPTS" \
  --data.input_key input \
  --data.label_key label \
  --data.apply_chat_template \
  --data.max_len $LENGTH \
  --rollout.max_new_tokens "$RESPONSE" \
  --rollout.temperature 1.0 \
  --rollout.batch_size 128 \
  --rollout.n_samples_per_prompt 8 \
  --train.batch_size 256 \
  --train.dynamic_batch_enable \
  --train.max_tokens_per_gpu $((2 * LENGTH)) \
  --train.num_episodes 2 \
  --train.max_epochs 1 \
  --train.colocate_all \
  --algo.advantage.estimator group_norm \
  --algo.kl.init_coef 0 \
  --actor.adam.lr 1e-6 \
  --actor.num_nodes 1 \
  --actor.num_gpus_per_node "$GPUS" \
  --actor.gradient_checkpointing_enable \
  --ref.num_nodes 1 \
  --ref.num_gpus_per_node "$GPUS" \
  --ds.zero_stage 3 \
  --ds.param_dtype bf16 \
  --ds.packing_samples \
  --ds.enable_sleep \
  --vllm.num_engines $((GPUS / TP)) \
  --vllm.tensor_parallel_size "$TP" \
  --vllm.gpu_memory_utilization 0.7 \
  --vllm.enable_sleep \
  --ckpt.output_dir "$OUTPUT" \
  --ckpt.path "$OUTPUT/checkpoints" \
  --ckpt.save_steps 50 \
  "$@"
