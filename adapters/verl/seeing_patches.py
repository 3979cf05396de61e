"""Fixes for verl's bugs with models that see."""

from __future__ import annotations

from jetrl_patch.adapters.base import Patch
from jetrl_patch.adapters.verl import delta_nets, fused, seeing
from jetrl_patch.patching.patch import NO_REPORT

__all__ = ["SEEING"]

_EQUAL_LENGTHS = (
    "verl lays out the position ids of models that see by the first dimension in which samples differ, and then names another: "
    "samples of one length, or a single one, end the step in split_with_sizes or get other positions. The layout is made "
    "right where a worker receives a batch. Megatron's packing is not covered"
)
_VERL_7901 = "https://github.com/verl-project/verl/pull/7901"
_VERL_6814 = "https://github.com/verl-project/verl/issues/6814"
_VERL_6659 = "https://github.com/verl-project/verl/pull/6659"
_TRANSFORMERS_46093 = "https://github.com/huggingface/transformers/issues/46093"
_GLM = "training GLM-4.1V in verl"

SEEING: tuple[Patch, ...] = (
    *(
        Patch(
            module=module,
            attr="maybe_fix_3d_position_ids",
            make=seeing.fix_position_ids,
            reason=_EQUAL_LENGTHS,
            remove_when="verl has verl#7901, or lays out position ids by their tokens wherever it makes a jagged tensor",
            upstream=_VERL_7901,
            fixes="verl",
        )
        for module in ("verl.workers.engine_workers", "verl.workers.engine.base")
    ),
    Patch(
        module="verl.models.transformers.qwen2_vl",
        attr="_get_input_embeds",
        make=seeing.input_embeds,
        reason="verl asks the tower's output for its mean; in transformers 5 it is no tensor, and a micro-batch without an image "
        "ends the step. Micro-batches with one are not changed",
        upstream=NO_REPORT,
        remove_when="verl unpacks the tower's output for the dummy image too, as in its other models",
        fixes="verl",
    ),
    Patch(
        module="verl.models.transformers.glm4v",
        attr="_get_input_embeds",
        make=seeing.image_embeds,
        reason="verl asks the tower's output for its shape and its mean; in transformers 5 it is no tensor, and every "
        "micro-batch ends the step. Under FSDP2 it ends there too, because the tower reads a table of positions that verl "
        "shards as a unit of its own. Films have not been tried",
        upstream=_VERL_6814,
        remove_when="verl unpacks the tower's output, as in its other models, and does not shard the table by itself",
        fixes="verl",
        needed_by=_GLM,
    ),
    Patch(
        module="verl.workers.rollout.vllm_rollout.vllm_async_server",
        attr="qwen2_5_vl_dedup_image_tokens",
        make=seeing.one_for_each,
        reason="verl hands vLLM a prompt with all tokens of an image, of which vLLM replaces the first by all: without an "
        "error the rollout sees an image's tokens nearly twice, the trainer once. Only for Qwen's image processor does verl "
        "leave one. Families without a record are not changed",
        upstream=NO_REPORT,
        remove_when="verl leaves one token for each image whatever the processor",
        fixes="verl",
    ),
    Patch(
        module="verl.utils.flops_counter",
        attr="FlopsCounter.__init__",
        make=seeing.counts_text,
        reason="verl counts GLM-4.1V's FLOPs by fields of the whole configuration, which transformers 5 keeps in that of the "
        "language model: the first update ends the run, in every mode. The tower is not counted, as before",
        upstream=NO_REPORT,
        remove_when="verl reads the fields of the language model's configuration for every family",
        fixes="verl",
        needed_by=_GLM,
    ),
    *(
        Patch(
            module=f"verl.models.transformers.{name}",
            attr="forward_with_torch_backend",
            make=fused.forward_with_gathered_head,
            reason="verl's fused forward of a model that sees multiplies with a head that FSDP2 has sharded: the step ends, or "
            "the head's gradient is each rank's own. Its Triton forward is not covered; the driver refuses it",
            upstream=_VERL_6659,
            remove_when="verl's fused forward leaves the head to FSDP2; what verl#6659 gathers has each rank's own gradient",
            fixes="verl",
        )
        for name in ("qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v")
    ),
    Patch(
        module="verl.models.transformers.qwen3_5",
        attr="_call_accepts_kwarg",
        make=delta_nets.accepts,
        reason="verl hands the boundaries of a packed row to a delta rule that drops them (transformers' own, without "
        "flash-linear-attention): each sequence begins with the state of the one before it. Models of text get none, and "
        "are refused in packed rows",
        upstream=_TRANSFORMERS_46093,
        remove_when="verl asks for a parameter of that name, or transformers' rule takes boundaries",
        fixes="verl",
    ),
)
