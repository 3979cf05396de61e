"""Exact counterparts of Hugging Face modules, and whether exact mode covers a model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import delta_net, latent, ops
from jetrl_patch.exact.elementwise import rope_parameters
from jetrl_patch.models.families import Family, covering, uncovered
from jetrl_patch.models.structure import has_delta_nets, text_config

# ---- Exact counterparts of Hugging Face modules, for the trainer, and for vLLM if it runs Hugging Face code
# ``swap`` changes a module's class in place. The module keeps its parameters and name and is still an instance of its original
# class.

class ExactNorm:
    """RMSNorm with the rollout's kernel: [..., K], computed from its BF16 value, -> BF16 [..., K]."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.weight, self.variance_epsilon)


class ExactMergedMLP:
    """``ExactMLP`` whose gate and up share one weight [2I, H]."""

    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden_states: Tensor) -> Any:
        return self.down_proj(ops.silu_mul(*self.gate_up_proj(hidden_states).chunk(2, -1)))


class ExactMLP:
    """Gated MLP with the rollout's SiLU(gate) * up, [..., H] -> [..., H]."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class ExactRotary:
    """cos and sin from the rollout's table, which is as long as the model's context.

    The host does not read the positions, because on a GPU it would wait for the device in every forward pass. For a position
    beyond the table, a CPU raises an error, after which the table grows. CUDA stops the process with its own "index out of
    bounds".
    """

    config: Any
    _jetrl_table: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions ``[..., T]`` -> cos and sin ``[..., T, D]``.

        Vision-language models have positions [3, B, T]: time, height and width. Each element of a head follows one of them. The
        rotary module of some families selects it, the attention of the others; since transformers 5.19 all rotary modules do.
        """
        tokens = 1 << (position_ids.shape[-1] - 1).bit_length()  # rounded up: the table rarely grows
        cos, sin = self._table(max(tokens, longest_context(self.config)), x.device)
        try:
            cos, sin = cos[position_ids], sin[position_ids]
        except IndexError:
            cos, sin = (table[position_ids] for table in self._table(int(position_ids.max()) + 1, x.device))
        recompose = getattr(self, "recomposition_frequencies", None)
        if recompose is not None:
            return recompose(cos), recompose(sin)
        select = getattr(self, "apply_interleaved_mrope", None)
        if select is not None:
            cos, sin = (select(t, self.mrope_section) for t in (cos, sin))  # type: ignore[attr-defined]
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def _table(self, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._jetrl_table is None or self._jetrl_table[0].shape[0] < size:
            self._jetrl_table = ops.rotary_table(ops.rope_frequencies(self.config), size, ops.rope_magnitude(self.config))
        cos, sin = self._jetrl_table
        if cos.device != device:  # both sides compute it on the CPU
            self._jetrl_table = cos, sin = cos.to(device), sin.to(device)
        return cos, sin


def longest_context(config: Any) -> int:
    """The model's maximum number of positions, as vLLM derives it from the config. Linear scaling multiplies it.

    With YaRN some releases read the scaled number from the config, others multiply the original one.
    """
    rope, positions = rope_parameters(config), config.max_position_embeddings
    if rope["rope_type"] not in ("linear", "yarn"):
        return int(positions)
    original = rope["original_max_position_embeddings"] if rope["rope_type"] == "yarn" else positions
    return math.ceil(max(positions, original * rope["factor"]))


class ExactEmbedding:
    """Embedding in BF16, the dtype of the residual stream, whatever the dtype of the master weights.

    The lookup stays the module's own, with its settings: ``padding_idx``, for example, keeps a row from being trained.
    """

    def forward(self, input: Tensor) -> Any:
        return super().forward(input).to(torch.bfloat16)  # type: ignore[misc]


class ExactLinear:
    """A BF16 linear layer with independent rows, [..., K] -> BF16 [..., N]: ``lm_head``, or a layer kept out of FP8."""

    weight: Tensor
    bias: Tensor | None
    jetrl_splits: int = 1

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias, self.jetrl_splits)


class ExactRouter:
    """The router of a mixture of experts: a product with independent rows, and the rollout's choice of experts.

    [..., H] -> logits BF16 [T, E], weights FP32 [T, k] and experts int64 [T, k] (``exact.route``).
    """

    weight: Tensor
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = ops.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        return logits_TE, *ops.route(logits_TE, self.top_k, getattr(self, "norm_topk_prob", True))


class ExactScores:
    """The router of a mixture with FP32 logits [T, E]: the unrounded product of [..., H], with independent rows."""

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.head_linear_fp32(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)


class ExactSigmoidRouter:
    """A router that chooses by the sigmoid of FP32 logits, a bias and groups. Inputs and results as ``ExactRouter``."""

    weight: Tensor
    e_score_correction_bias: Tensor
    top_k: int
    norm_topk_prob: bool
    num_group: int
    topk_group: int
    routed_scaling_factor: float

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = ops.head_linear_fp32(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        rule = ops.Sigmoid(self.e_score_correction_bias, self.num_group, self.topk_group, self.routed_scaling_factor)
        return logits_TE, *ops.route(logits_TE, self.top_k, self.norm_topk_prob, rule)


class ExactChoice:
    """A block that chooses its experts from the logits of ``ExactScores`` itself, as in transformers before 5.13."""

    gate: Any
    top_k: int
    norm_topk_prob: bool
    n_group: int
    topk_group: int
    routed_scaling_factor: float

    def route_tokens_to_experts(self, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        groups = (self.n_group, self.topk_group)
        rule = ops.Sigmoid(self.gate.e_score_correction_bias, *groups, self.routed_scaling_factor)
        weights_Tk, ids_Tk = ops.route(router_logits, self.top_k, self.norm_topk_prob, rule)
        return ids_Tk, weights_Tk


_made: dict[tuple[type, type], type] = {}


def swap(module: nn.Module, behavior: type) -> None:
    """Give ``module`` the forward of ``behavior``, in place. A second call changes nothing."""
    original = type(module)
    if issubclass(original, behavior):
        return
    key = (behavior, original)
    if key not in _made:
        _made[key] = type(f"{behavior.__name__}_{original.__name__}", key, {"__module__": __name__})
    module.__class__ = _made[key]


def unswap(module: nn.Module) -> None:
    """Undo the last ``swap``, in place."""
    module.__class__ = type(module).__bases__[1]


# ---- Check whether exact mode covers a model, from the record of its family ----------------------

_ROPE_TYPES = ("default", "llama3", "linear", "yarn")
_WAY_OUT = 'use align="linear" (only the FP8 linears are the same), or precision="bf16"'


def check_family(hf_config: Any) -> Family:
    """Return the record of the model's family.

    Raises ModelError if the family, or a setting of the model, is not covered. The message names it and the alternatives.
    """
    model_type = getattr(hf_config, "model_type", None)
    covered = covering("exact")
    if model_type not in covered:
        required, found = f"one of the model families {', '.join(covered)}", uncovered(hf_config, "exact")
        raise ModelError(explain('align="exact"', required=required, found=found, fix=_WAY_OUT))
    family = covered[model_type]
    text = text_config(hf_config)
    broken = [setting for setting in family.settings if setting.problem(text)]
    problems = [setting.problem(text) for setting in broken]
    rope = rope_parameters(text)
    if rope["rope_type"] not in _ROPE_TYPES:
        problems.append(f"rope type {rope['rope_type']!r} (expected one of {', '.join(_ROPE_TYPES)})")
    if problems:
        fix = " or ".join([*dict.fromkeys(f"{setting.fix}," for setting in broken if setting.fix), _WAY_OUT])
        raise ModelError(
            f'align="exact" does not cover this {model_type} model: {"; ".join(problems)}. {fix[0].upper()}{fix[1:]}.'
        )
    return family


def check_kernels(hf_config: Any, config: Config, device_type: str) -> None:
    """Raise the error of ``check_latent`` or ``require_kernels`` for a model whose exact ops have no kernels on a device."""
    latent.check_latent(hf_config, config.kv_cache, device_type, config.backend)
    if has_delta_nets(hf_config):
        delta_net.require_kernels(device_type, config.backend)
