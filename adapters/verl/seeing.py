"""What verl 0.9 lacks to train models that see: position ids of one length, micro-batches without an image, and
images in other families than Qwen's.

A token of such a model has R = 4 position ids: its place in the text, and time, height and width. verl carries a batch of them
as a jagged tensor [B, R, j] whose values are [R, sum of lengths] and whose offsets count tokens. It builds that tensor by
``torch.nested.as_nested_tensor``, which takes the first dimension that differs between the samples for the jagged one: with
samples of one length, or a single sample, none differs, and it takes R. Then the values are [B * R, length], and the offsets
count rows. verl, which loses the number of the jagged dimension between processes, sets it to the last one in both cases.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.verl import delta_nets, fused, ulysses
from jetrl_patch.adapters.verl.paths import named
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.gate import while_active
from jetrl_patch.structure import sees
from jetrl_patch.trainer.rules import raised

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "along_tokens",
    "check_worker",
    "counts_text",
    "fix_position_ids",
    "image_embeds",
    "input_embeds",
    "one_for_each",
    "problems",
]

#: false in the one-step-off and the fully asynchronous program; a choice in V1's separate_async
_HYBRID = "actor_rollout_ref.hybrid_engine"


def problems(select: Callable[[str], Any], hf_config: Any) -> Iterator[JetrlError]:
    """Yield an error for each setting that no run of a model that sees has shown to be right."""
    yield from delta_nets.problems(select, hf_config)
    yield from raised(lambda: fused.check_setting(select, hf_config))
    if sees(hf_config) and select(_HYBRID) is False:
        required = "True for a model that sees (the one-step-off and the fully asynchronous program have not run with one)"
        fix = "set it to true and start verl.trainer.main_ppo"
        yield ConfigError(explain(named(_HYBRID), required=required, found="False", fix=fix))


def check_worker(hf_config: Any, engine: Any) -> None:
    """Raise ModelError as ``problems``, for a model that the driver could not read."""
    ulysses.check_whole(hf_config, engine.ulysses_sequence_parallel_size)
    delta_nets.check_packing(hf_config, bool(engine.model_config.use_remove_padding))
    if engine.model_config.use_fused_kernels:
        fused.check_seeing(engine.model_config.fused_kernel_options.get("impl_backend"), hf_config)


def along_tokens(values: Tensor, offsets: Tensor) -> Tensor:
    """Return the position ids of a batch as a jagged tensor [B, R, j], jagged along the tokens.

    Args:
        values: int64 [R, sum of lengths], or [B * R, length] from samples of one length, one after the other.
        offsets: int64 [B + 1], where each sample's tokens begin in the batch, and where the last one's end.

    Raises:
        ValueError: ``values`` are neither.
    """
    import torch

    batch, total, length = offsets.numel() - 1, int(offsets[-1]), values.shape[-1]
    if length != total:
        rows, rest = divmod(values.shape[0], batch)
        if values.dim() != 2 or rest or not bool((offsets.diff() == length).all()):
            raise ValueError(f"position ids {tuple(values.shape)} fit no batch with offsets {offsets.tolist()}")
        values = values.view(batch, rows, length).transpose(0, 1).reshape(rows, total)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


@while_active
def fix_position_ids(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``maybe_fix_3d_position_ids``, which every worker calls on a batch before it splits it or computes with it."""

    def maybe_fix_3d_position_ids(data: Any) -> None:
        positions, tokens = (data.get(name, None) for name in ("position_ids", "input_ids"))
        if positions is None or not positions.is_nested or positions.dim() != 3:
            return
        if tokens is None or not tokens.is_nested:
            original(data)
            return
        data["position_ids"] = along_tokens(positions._values, tokens.offsets())

    return maybe_fix_3d_position_ids


@while_active
def input_embeds(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``qwen2_vl._get_input_embeds``: the dummy image of a micro-batch without one."""

    def _get_input_embeds(
        model: Any,
        input_ids: Any,
        attention_mask: Any = None,
        pixel_values: Any = None,
        pixel_values_videos: Any = None,
        image_grid_thw: Any = None,
        video_grid_thw: Any = None,
    ) -> Any:
        if pixel_values is not None or pixel_values_videos is not None:
            grids = (image_grid_thw, video_grid_thw)
            return original(model, input_ids, attention_mask, pixel_values, pixel_values_videos, *grids)
        embeds = model.get_input_embeddings()(input_ids)
        return embeds + 0.0 * _of_nothing(model, embeds), attention_mask

    return _get_input_embeds


class _Unpacked:
    """A model whose tower returns what it makes of the images as a tensor; in transformers 5 it returns an output with more.

    The tower's table of positions is gathered for it where FSDP2 has sharded it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def visual(self) -> Any:
        return _Tower(self._model.visual)


class _Tower:
    def __init__(self, tower: Any) -> None:
        self._tower, self.dtype = tower, tower.dtype

    def __call__(self, pixels: Tensor, **kwargs: Any) -> Tensor:
        from torch import nn
        from verl.utils.transformers_compat import unpack_visual_output

        with contextlib.ExitStack() as stack:
            for module in self._tower.modules():  # verl makes each embedding an FSDP2 unit, and the tower reads the table itself
                if isinstance(module, nn.Embedding):
                    stack.enter_context(fused.gathered(module))
            seen: Tensor = unpack_visual_output(self._tower(pixels, **kwargs))[0]
        return seen


@while_active
def image_embeds(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a ``_get_input_embeds`` that takes the tower's output for a tensor, with an image and without one."""
    embeds = input_embeds(original)

    def _get_input_embeds(model: Any, *args: Any, **kwargs: Any) -> Any:
        return embeds(_Unpacked(model), *args, **kwargs)

    return _get_input_embeds


@while_active
def counts_text(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``FlopsCounter.__init__``: what is counted as a text model has the language model's configuration."""

    def __init__(self: Any, config: Any) -> None:
        from verl.utils import flops_counter

        original(self, config)
        as_text = flops_counter.ESTIMATE_FUNC.get(config.model_type) is flops_counter._estimate_qwen2_flops
        if as_text and not hasattr(config, "hidden_size"):
            self.config = copy.copy(config.get_text_config())
            self.config.model_type = config.model_type

    return __init__


@while_active
def one_for_each(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``qwen2_5_vl_dedup_image_tokens``: one token for each image of a prompt, which vLLM replaces by the image's."""

    def dedup(prompt_ids: list[int], processor: Any) -> list[int]:
        if not sees(getattr(processor, "config", None)):
            kept: list[int] = original(prompt_ids, processor)
            return kept
        from verl.workers.rollout.utils import get_vision_placeholder_token_ids

        places = set(get_vision_placeholder_token_ids(processor))
        before = [None, *prompt_ids[:-1]]
        return [token for token, last in zip(prompt_ids, before, strict=True) if token != last or token not in places]

    return dedup


def _of_nothing(model: Any, embeds: Tensor) -> Tensor:
    """The mean of what the tower makes of a black image: a scalar through which every rank of FSDP uses the tower."""
    import torch
    from verl.utils.transformers_compat import unpack_visual_output

    tower = model.config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    pixels = torch.zeros((16, width), dtype=embeds.dtype, device=embeds.device)
    seen, _ = unpack_visual_output(model.visual(pixels, grid_thw=torch.tensor([[1, 4, 4]], device=embeds.device)))
    return seen.mean()
