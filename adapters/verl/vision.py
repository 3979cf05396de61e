"""Fixes without which verl 0.9 cannot train vision-language models and models with gated delta nets. They apply in every mode."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.verl import logprob, ulysses
from jetrl_patch.adapters.verl.yaml_settings import MODEL, Select, data_files, named
from jetrl_patch.errors import ConfigError, JetrlError, ModelError, explain
from jetrl_patch.models.structure import has_delta_nets, is_vision_language
from jetrl_patch.patching.patch import NO_REPORT, replacement
from jetrl_patch.registry import Patch
from jetrl_patch.trainer.rules import raised

if TYPE_CHECKING:
    from torch import Tensor

# ---- Gated delta nets: a token's output depends on a state that accumulates over the tokens before it ----
# A packed row therefore needs its sequence boundaries. Without them a sequence silently starts with the state of the previous
# one. verl passes boundaries to its own forward of vision-language models, which splits a row if the delta rule does not take
# them. It looks for an argument's name, but transformers' own rule, used without flash-linear-attention, accepts any name through
# ``**kwargs`` and ignores it. Text models with delta nets get no boundaries from verl; in exact mode they find them themselves.

_REMOVE = f"{MODEL}.use_remove_padding"


def check_packing(hf_config: Any, packed: bool, exact: bool, what: str = "use_remove_padding") -> None:
    """Raise ModelError for packed rows of a text model with delta nets, unless exact mode gives these the positions."""
    if packed and not exact and has_delta_nets(hf_config) and not is_vision_language(hf_config):
        required = "one sequence per row (in a packed row each delta net would start with the state of the previous sequence)"
        found = f"True, with model_type={hf_config.model_type!r}"
        raise ModelError(explain(what, required=required, found=found, fix="set it to false"))


@replacement
def accepts(original: Any, fn: Any, name: str) -> bool:
    """Replace ``_call_accepts_kwarg``: whether a function has a parameter of this name. ``**kwargs`` does not count."""
    return name in signature(fn).parameters


# ---- Vision-language models: position ids, micro-batches without an image, and families other than Qwen's ----
# A token of such a model has R = 4 position ids: its place in the text, and time, height and width. verl stores a batch of them
# as a jagged tensor [B, R, j] with values [R, sum of lengths] and offsets that count tokens. It builds the tensor with
# ``torch.nested.as_nested_tensor``, which makes the first dimension that differs between samples the jagged one. If all samples
# have one length, none differs and torch takes R: the values are [B * R, length], and the offsets count rows. The number of the
# jagged dimension is lost between processes; verl sets it to the last one in both cases.

#: false in the one-step-off and the fully asynchronous program; free in V1's separate_async
_HYBRID = "actor_rollout_ref.hybrid_engine"
_LINEAR = "use align='linear', or data without videos"


def problems(select: Select, hf_config: Any, exact: bool) -> Iterator[JetrlError]:
    """Yield an error for each setting that is wrong or untested with delta nets or a vision tower."""
    yield from raised(lambda: check_packing(hf_config, bool(select(_REMOVE)), exact, named(_REMOVE)))
    if select(logprob.USED):
        yield from raised(lambda: logprob.check_fused(select(logprob.IMPLEMENTATION), hf_config))
    if is_vision_language(hf_config) and select(_HYBRID) is False:
        required = "True for a vision-language model (the one-step-off and the fully asynchronous program are untested with one)"
        fix = "set it to true and start verl.trainer.main_ppo"
        yield ConfigError(explain(named(_HYBRID), required=required, found="False", fix=fix))
    if exact and is_vision_language(hf_config):
        for setting, path in data_files(select):
            if _has_values(Path(path).expanduser(), key := str(select("data.video_key"))):
                required, found = "images and text in exact mode (videos have not been tried)", f"videos in its column {key!r}"
                yield ConfigError(explain(f"{setting}={path}", required=required, found=found, fix=_LINEAR))


def _has_values(file: Path, column: str) -> bool:
    """Whether the metadata of a local Parquet file counts a value in a column, or inside its lists."""
    if file.suffix != ".parquet" or not file.is_file():
        return False
    import pyarrow.parquet as parquet

    metadata = parquet.read_metadata(file)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    own = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == column]
    # an empty list counts as one value, which is null
    return any(chunk.statistics and chunk.num_values > chunk.statistics.null_count for chunk in own)


def check_worker(hf_config: Any, engine: Any, exact: bool) -> None:
    """Raise the errors of ``problems`` in a worker, for a model whose config.json the driver could not read."""
    ulysses.check_whole(hf_config, engine.ulysses_sequence_parallel_size)
    check_packing(hf_config, bool(engine.model_config.use_remove_padding), exact)
    if engine.model_config.use_fused_kernels:
        logprob.check_fused(engine.model_config.fused_kernel_options.get("impl_backend"), hf_config)


def along_tokens(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the position ids of a batch as a jagged tensor [B, R, j] whose jagged dimension is the tokens.

    Args:
        values: int64 [R, sum of lengths], or [B * R, length] if all samples have one length: sample after sample. Raises
            ValueError for any other shape.
        offsets: int64 [B + 1]: where each sample's tokens start in the batch, and where the last sample's end.
    """
    import torch

    batch, total, length = offsets.numel() - 1, int(offsets[-1]), values.shape[-1]
    if length != total:
        rows, rest = divmod(values.shape[0], batch)
        if values.dim() != 2 or rest or not bool((offsets.diff() == length).all()):
            raise ValueError(f"position ids {tuple(values.shape)} do not match a batch with offsets {offsets.tolist()}")
        values = values.view(batch, rows, length).transpose(0, 1).reshape(rows, total)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


@replacement
def fix_position_ids(original: Any, data: Any) -> None:
    """Replace ``maybe_fix_3d_position_ids``, which every worker calls before it splits or uses a batch."""
    positions, tokens = (data.get(name, None) for name in ("position_ids", "input_ids"))
    if positions is None or not positions.is_nested or positions.dim() != 3:
        return
    if tokens is None or not tokens.is_nested:
        original(data)
        return
    data["position_ids"] = along_tokens(positions._values, tokens.offsets())


@replacement
def input_embeds(
    original: Any,
    model: Any,
    input_ids: Any,
    attention_mask: Any = None,
    pixel_values: Any = None,
    pixel_values_videos: Any = None,
    image_grid_thw: Any = None,
    video_grid_thw: Any = None,
) -> Any:
    """Wrap ``qwen2_vl._get_input_embeds``: in a micro-batch without an image, run the vision tower on a dummy image."""
    if pixel_values is not None or pixel_values_videos is not None:
        grids = (image_grid_thw, video_grid_thw)
        return original(model, input_ids, attention_mask, pixel_values, pixel_values_videos, *grids)
    embeds = model.get_input_embeddings()(input_ids)
    return embeds + 0.0 * _mean_of_dummy(model, embeds), attention_mask


@contextlib.contextmanager
def _unpacked(tower: Any) -> Iterator[None]:
    """While in use, a vision tower returns a tensor, as verl expects, and not the output object of transformers 5.

    Its embeddings are gathered: each is an FSDP2 unit, but the tower reads the weight of its position table directly.
    """
    from torch import nn
    from verl.utils.transformers_compat import unpack_visual_output

    hook = tower.register_forward_hook(lambda module, inputs, output: unpack_visual_output(output)[0])
    try:
        with contextlib.ExitStack() as stack:
            for module in tower.modules():
                if isinstance(module, nn.Embedding):
                    stack.enter_context(logprob.gathered(module))
            yield
    finally:
        hook.remove()


@replacement
def image_embeds(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a ``_get_input_embeds`` that uses the tower's output as a tensor, with an image or without one."""
    with _unpacked(model.visual):
        return input_embeds(original)(model, *args, **kwargs)


@replacement
def counts_text(original: Any, self: Any, config: Any) -> None:
    """Wrap ``FlopsCounter.__init__``: count a model that verl takes for a text model by its ``text_config``."""
    from verl.utils import flops_counter

    original(self, config)
    as_text = flops_counter.ESTIMATE_FUNC.get(config.model_type) is flops_counter._estimate_qwen2_flops
    if as_text and not hasattr(config, "hidden_size"):
        self.config = copy.copy(config.get_text_config())
        self.config.model_type = config.model_type


@replacement
def one_for_each(original: Any, prompt_ids: list[int], processor: Any) -> list[int]:
    """Wrap ``qwen2_5_vl_dedup_image_tokens``: keep one token per image of a prompt; vLLM expands it to the image's tokens."""
    if not is_vision_language(getattr(processor, "config", None)):
        kept: list[int] = original(prompt_ids, processor)
        return kept
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    places = set(get_vision_placeholder_token_ids(processor))
    before = [None, *prompt_ids[:-1]]
    return [token for token, last in zip(prompt_ids, before, strict=True) if token != last or token not in places]


def _mean_of_dummy(model: Any, embeds: Tensor) -> Tensor:
    """Return the mean of the tower's output for a black image: a scalar that makes every FSDP rank run the tower."""
    import torch
    from verl.utils.transformers_compat import unpack_visual_output

    tower = model.config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.zeros((16, width), dtype=embeds.dtype, device=embeds.device)
    features, _ = unpack_visual_output(model.visual(pixels, grid_thw=torch.tensor([[1, 4, 4]], device=embeds.device)))
    return features.mean()


# ---- Exact mode ----

@replacement
def exact_attention(
    original: Any, self: Any, hidden_states: Tensor, attention_mask: Any = None, position_ids: Any = None,
    position_embeddings: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Wrap ``qwen2_vl_attn_forward``, which always calls flash attention: another attention that was chosen stays."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    chosen = self.config._attn_implementation
    if "flash" in chosen or chosen not in ALL_ATTENTION_FUNCTIONS:
        return original(self, hidden_states, attention_mask, position_ids, position_embeddings, **kwargs)
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
    rotate = importlib.import_module(type(self).__module__).apply_multimodal_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings, self.config.rope_parameters["mrope_section"])
    out, _ = ALL_ATTENTION_FUNCTIONS[chosen](self, q, k, v, attention_mask, scaling=self.scaling, position_ids=position_ids)
    return self.o_proj(out.flatten(2)), None


# ---- The patches ----

_GLM = "training GLM-4.1V in verl"

VISION: tuple[Patch, ...] = (
    Patch(
        "verl.models.transformers.qwen2_vl", "qwen2_vl_attn_forward", exact_attention,
        when=lambda config: config.exact,
        reason="for packed rows verl calls FlashAttention-2 in this module's families, which differs from the rollout's. "
        "Slices of sequences (Ulysses) are not covered",
        remove_when="verl's monkey_patch leaves the attention of a model alone whose _attn_implementation is not flash attention",
    ),
    *(
        Patch(
            module, "maybe_fix_3d_position_ids", fix_position_ids,
            reason="verl builds 3D position ids of vision-language models with the wrong ragged dimension when all samples have "
            "one length: the step crashes in split_with_sizes or uses wrong positions. Megatron's packing is not covered",
            remove_when="the oldest supported verl contains verl#7901, or makes the tokens the ragged dimension everywhere",
            upstream="https://github.com/verl-project/verl/pull/7901",
            fixes="verl",
        )
        for module in ("verl.workers.engine_workers", "verl.workers.engine.base")
    ),
    Patch(
        "verl.models.transformers.qwen2_vl", "_get_input_embeds", input_embeds,
        reason="verl calls mean() on the vision tower's output, which transformers 5 no longer returns as a tensor: a "
        "micro-batch without an image crashes. Others are unchanged",
        upstream=NO_REPORT,
        remove_when="verl's qwen2_vl._get_input_embeds calls unpack_visual_output for the dummy image too, as other models do",
        fixes="verl",
    ),
    Patch(
        "verl.models.transformers.glm4v", "_get_input_embeds", image_embeds,
        reason="verl uses the vision tower's output as a tensor, which it is not in transformers 5, and FSDP2 shards the "
        "tower's position table on its own: every micro-batch crashes. Videos are untested",
        upstream="https://github.com/verl-project/verl/issues/6814",
        remove_when="verl's glm4v._get_input_embeds calls unpack_visual_output, and verl's FSDP2 wrapping leaves the tower's "
        "position embedding with its parent",
        fixes="verl",
        needed_by=_GLM,
    ),
    Patch(
        "verl.workers.rollout.vllm_rollout.vllm_async_server", "qwen2_5_vl_dedup_image_tokens", one_for_each,
        reason="verl removes repeated image tokens from vLLM's prompt only for Qwen's image processor; with others vLLM "
        "expands them again, so the rollout silently sees an image almost twice. Unknown families are unchanged",
        upstream=NO_REPORT,
        remove_when="verl's qwen2_5_vl_dedup_image_tokens, or its successor, leaves one token per image for all image processors",
        fixes="verl",
    ),
    Patch(
        "verl.utils.flops_counter", "FlopsCounter.__init__", counts_text,
        reason="verl's FLOP counter reads GLM-4.1V fields that transformers 5 moved to text_config: the first update crashes "
        "in every mode. The vision tower is still not counted",
        upstream=NO_REPORT,
        remove_when="verl's FlopsCounter reads text_config where a configuration has one, for every family",
        fixes="verl",
        needed_by=_GLM,
    ),
    *(
        Patch(
            f"verl.models.transformers.{name}", "forward_with_torch_backend", logprob.forward_with_gathered_head,
            reason="verl's fused forward of vision-language models multiplies by an lm_head that FSDP2 has sharded: the step "
            "crashes, or lm_head's gradient stays local to each rank. The driver rejects the Triton forward",
            upstream="https://github.com/verl-project/verl/pull/6659",
            remove_when="verl's fused forward calls lm_head, so FSDP2 gathers it and reduces its gradient (verl#6659 does not)",
            fixes="verl",
        )
        for name in ("qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v")
    ),
    Patch(
        "verl.models.transformers.qwen3_5", "_call_accepts_kwarg", accepts,
        reason="verl passes packed-sequence boundaries to transformers' own delta rule, which ignores them, so state leaks "
        "from one sequence to the next. Text models get no boundaries: outside exact mode packed rows are an error for them",
        upstream="https://github.com/huggingface/transformers/issues/46093",
        remove_when="verl's _call_accepts_kwarg ignores **kwargs, or transformers' torch_chunk_gated_delta_rule obeys cu_seqlens",
        fixes="verl",
    ),
)
