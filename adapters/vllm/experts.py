"""Load, route and multiply a mixture's experts as the trainer does, in FP8 or in BF16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import RowParallelLinear

from jetrl_patch.adapters.vllm.formats import format_of, logger
from jetrl_patch.adapters.vllm.method import finite_bf16
from jetrl_patch.adapters.vllm.ranks import sum_over_ranks
from jetrl_patch.adapters.vllm.shards import Shard
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ModelError, SyncError, explain
from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import swap
from jetrl_patch.fp8.experts import PROJECTIONS, ExpertWeights, run_experts
from jetrl_patch.fp8.grouped import Stacks, require_expert_equality, run_grouped
from jetrl_patch.fp8.mixture import ExpertSplit, PlainProducts, added
from jetrl_patch.kernels.formats import BLOCK, FP8, groups
from jetrl_patch.models.structure import matrices_of

if TYPE_CHECKING:
    from jetrl_patch.backends import Backend


# ---- The runner of a mixture ---------------------------------------------------------------------
# To return the experts of each token (``enable_return_routed_experts``), vLLM asks its own routers, or a module with a
# ``capture_fn``. In exact mode the experts method routes, so the runner offers a ``capture_fn`` for it.
#
# vLLM adds a rank's routed and shared experts in BF16 and then sums over the ranks. The trainer sums each of them over the ranks
# and rounds once before it adds them. So in exact mode the experts method and ``ExactRowParallelLinear`` add the ranks' FP32
# sums: the down projection of shared experts gets a reduction, and the runner loses its own. On a GPU vLLM computes shared
# experts beside the routed ones, on a second stream. Two sums at a time would use the same buffers and flags of vLLM's custom
# all-reduce, so with several ranks there is no second stream.
#
# vLLM's runner also multiplies the rounded sum over the routed experts by the model's factor, if it has one. The trainer
# multiplies the routing weights in FP32 and rounds the sum once. So in exact mode the factor moves to the experts method.

class CapturingRunner(MoERunner):
    """Gives vLLM's capture function to the method, which calls it with the experts [T, k] that it uses."""

    routed_experts: Any

    @property
    def capture_fn(self) -> Callable[[torch.Tensor], None] | None:
        found: Callable[[torch.Tensor], None] | None = self.routed_experts.quant_method.capture
        return found

    @capture_fn.setter
    def capture_fn(self, capture: Callable[[torch.Tensor], None] | None) -> None:
        self.routed_experts.quant_method.capture = capture


class CompleteRunner(CapturingRunner):
    """Adds routed and shared experts without a reduction: both are complete on every rank."""

    def _maybe_reduce_final_output(
        self, states: torch.Tensor, trunc_size: int | None, output_is_reduced: bool | None = None
    ) -> torch.Tensor:
        return states if trunc_size is None else states[..., :trunc_size]


def set_runners(model: torch.nn.Module) -> None:
    """Give a loaded model's mixtures their runner; in exact mode move reductions and factors. A second call changes nothing."""
    for module in model.modules():
        method: Any = module.routed_experts.quant_method if isinstance(module, MoERunner) else None
        if not isinstance(method, QuantizedExpertsMethod):
            continue
        if not method.exact:
            swap(module, CapturingRunner)
            continue
        swap(module, CompleteRunner)
        if module.routed_experts.scoring_func == "sigmoid":
            method.scale *= module.routed_scaling_factor
            module.routed_scaling_factor = 1.0
        shared: Any = module.shared_experts
        for layer in shared.modules() if shared is not None else ():
            if isinstance(layer, RowParallelLinear):
                layer.reduce_results = True
        if shared is not None and method.split.ranks > 1:
            shared._stream = None


# ---- The experts method --------------------------------------------------------------------------
# vLLM stores the experts of a block in ``w13_weight [E, 2I, H]`` (gate, then up) and ``w2_weight [E, H, I]``. The trainer sends
# the three matrices of each expert under their checkpoint names. Scales are stored per row, as in the linears. Experts that
# ``exclude`` or the precision guard left in BF16 have no scales. With several ranks, each holds a range of the experts, or a
# range of every expert's intermediate size: rows of gate and up, columns of down.

#: vLLM's names of an expert's matrices; w1 and w3 are in ``w13``, w1 first
_SHARDS = dict(zip(("w1", "w3", "w2"), PROJECTIONS, strict=True))


class Piece(NamedTuple):
    """This rank's part of one expert's matrix: e4m3 [N, K] with FP32 scales [N, ceil(K/128)], or BF16, and its place."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    shard: Shard


class QuantizedExpertsMethod(FusedMoEMethodBase):
    """The experts of one block, in BF16 unless ``quantized``. In exact mode this also routes; otherwise vLLM's router does.

    Raises ModelError if the trainer does not support the router, the activation or the split.
    """

    def __init__(self, config: Config, layer: RoutedExperts, prefix: str, quantized: bool = True) -> None:
        super().__init__(layer.moe_config)
        self.prefix = prefix
        #: the products of BF16 experts; None in FP8
        self.plain = None if quantized else PlainProducts(config.exact)
        self.exact = config.exact
        self.format = format_of(config)
        self.scale_format = config.scale_format
        #: factor for routing weights, which ``set_runners`` moves here
        self.scale = 1.0
        #: receives the experts [T, k] of each forward pass, if the engine returns them
        self.capture: Callable[[torch.Tensor], None] | None = None
        self._unwritten: set[str] = set()
        _check(layer, self.exact)
        parallel, self.experts = layer.moe_config.moe_parallel_config, layer.moe_config.num_experts
        by_experts = parallel.ep_size > 1
        self.split = ExpertSplit.of(parallel.ep_size if by_experts else parallel.tp_size, parallel.ep_size)
        #: number of parts that each expert's intermediate size is split into, and this rank's part
        self.parts: int = 1 if by_experts else parallel.tp_size
        self.part: int = 0 if by_experts else parallel.tp_rank
        first = parallel.ep_rank * layer.local_num_experts
        #: the experts of this rank
        self.held = range(first, first + layer.local_num_experts)

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``w13_weight``, ``w2_weight`` (e4m3) and their ``_scale_inv`` (FP32, per row), or the weights in BF16.

        Raises ModelError if the split is uneven or cuts a block.
        """
        self.split.check(f"the experts of {self.prefix}", self.experts, intermediate_size_per_partition * self.parts)
        wide = 2 * intermediate_size_per_partition
        for name, n, k in (("w13", wide, hidden_size), ("w2", hidden_size, intermediate_size_per_partition)):
            weight = torch.empty(num_experts, n, k, dtype=FP8 if self.plain is None else torch.bfloat16)
            self._register(layer, f"{name}_weight", weight)
            if self.plain is None:
                self._register(layer, f"{name}_weight_scale_inv", torch.ones(num_experts, n, groups(k), dtype=torch.float32))
        self.expect(layer)

    def _register(self, layer: RoutedExperts, name: str, value: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(value, requires_grad=False)
        load = self._load_scale if name.endswith("_scale_inv") else self._load_weight

        def load_if_held(
            param: torch.Tensor, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int, **_: Any
        ) -> bool:
            if expert_id in self.held:
                load(self.piece(layer, expert_id, shard_id), loaded_weight)
            return expert_id in self.held

        parameter.weight_loader = load_if_held
        setattr(layer, name, parameter)

    @torch.no_grad()
    def room_in_bf16(self, layer: RoutedExperts) -> dict[str, torch.Tensor]:
        """Allocate BF16 tensors for ``to_bf16``. If memory runs out, nothing has changed."""
        names = ("w13_weight", "w2_weight")
        return {name: torch.empty_like(getattr(layer, name).data, dtype=torch.bfloat16) for name in names}

    def to_bf16(self, layer: RoutedExperts, room: dict[str, torch.Tensor]) -> None:
        """Move to BF16 for good, as if ``exclude`` had named the experts. The weights are uninitialized until loaded."""
        self.plain = PlainProducts(self.exact)
        for name, value in room.items():
            delattr(layer, name)
            delattr(layer, f"{name}_scale_inv")
            self._register(layer, name, value)
        self.expect(layer)

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("weight", "weight_scale_inv") if self.plain is None else ("weight",)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that ``missing`` checks."""
        return tuple(f"{name}_{kind}" for name in ("w13", "w2") for kind in self._kinds)

    def pieces(self, layer: RoutedExperts) -> Iterator[Piece]:
        """Yield this rank's matrices, expert by expert, under their checkpoint names."""
        for expert in self.held:
            for shard_id in _SHARDS:
                yield self.piece(layer, expert, shard_id)

    def piece(self, layer: RoutedExperts, expert: int, shard_id: str) -> Piece:
        """Return views of one matrix and its scales. ``expert`` is a global index, one of ``held``."""
        at, whole = expert - self.held.start, f"{self.prefix}.{expert}.{_SHARDS[shard_id]}"
        parameter = "w2" if shard_id == "w2" else "w13"
        held = [getattr(layer, f"{parameter}_{kind}").data[at] for kind in self._kinds]
        if shard_id == "w2":
            n, k = held[0].shape
            shard = Shard(whole, shard_id, n, 0, n, self.part * k, (self.part + 1) * k, 0)
        else:
            held = [t.chunk(2, 0)[shard_id == "w3"] for t in held]
            n, k = held[0].shape
            shard = Shard(whole, shard_id, n * self.parts, self.part * n, (self.part + 1) * n, 0, k, 0)
        return Piece(held[0], held[1] if self.plain is None else None, shard)

    def layers(self) -> list[str]:
        """Return the Hugging Face names of the matrices on all ranks."""
        return matrices_of(self.prefix, self.experts)

    def expect(self, layer: RoutedExperts) -> None:
        """Expect a write to every matrix of this rank and to its scales."""
        self._unwritten = {f"{piece.shard.name}.{kind}" for piece in self.pieces(layer) for kind in self._kinds}

    def missing(self) -> list[str]:
        """Return the tensors not written since ``expect``."""
        return sorted(self._unwritten)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: vLLM's kernels are not used."""

    @property
    def is_monolithic(self) -> bool:
        """Whether the method routes by itself."""
        return self.exact

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Choose the GEMM. Raise ModelError before serving if a row depends on its batch here, or a matrix is missing."""
        missing, every = self.missing(), len(self._kinds) * len(_SHARDS) * len(self.held)
        if 0 < len(missing) < every:  # if all are missing, these are dummy weights that a sync replaces
            found, fix = f"{every - len(missing)}, without {', '.join(missing[:3])}", "use a complete checkpoint"
            raise ModelError(explain(f"experts of {self.prefix}", required=f"{every} tensors", found=found, fix=fix))
        backend = self.format.backend(layer.w2_weight.device)
        if self.plain is not None:
            return
        if backend.grouped(layer.w2_weight) is None and layer.w2_weight.device.type == "cpu":
            return  # runs one expert at a time, with products that the tests prove
        self.check_grouped(layer, backend)

    def check_grouped(self, layer: Any, backend: Backend) -> None:
        """Raise ModelError before serving if an expert's result for a token depends on the batch on this device."""
        _, hidden, width = layer.w2_weight.shape
        start, sizes, device = time.monotonic(), (hidden, width), layer.w2_weight.device
        if require_expert_equality(backend, self.experts, layer.top_k, sizes, device, self.scale_format):
            words = "jetrl_patch: grouped products compute the trainer's rows for experts of %d x %d, tried in %.1f s"
            logger.info(words, width, hidden, time.monotonic() - start)

    def apply_monolithic(
        self, layer: RoutedExperts, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x [T, H]`` BF16 and the router's logits ``[T, E]`` -> ``[T, H]`` BF16."""
        rule = None
        if layer.scoring_func == "sigmoid":
            bias, groups, chosen = layer.e_score_correction_bias.data, layer.num_expert_group or 1, layer.topk_group or 1
            rule = ops.Sigmoid(bias, groups, chosen, self.scale)
        return self._mix(layer, x, *ops.route(router_logits, layer.top_k, layer.renormalize, rule))

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, H]`` BF16, weights and experts ``[T, k]`` by vLLM's router -> ``[T, H]`` BF16."""
        return self._mix(layer, x, topk_weights, topk_ids.long())

    def stacks(self, layer: Any, kernels: Any) -> Stacks:
        """Return views of all matrices and of their scales per block."""
        gate_up = (t.data.unflatten(1, (2, -1)).flatten(0, 1) for t in (layer.w13_weight, layer.w13_weight_scale_inv))
        down = (layer.w2_weight.data, layer.w2_weight_scale_inv.data)
        return Stacks(*(Quantized(q, kernels.block_view(s), "blocks", self.scale_format) for q, s in (gate_up, down)))

    def _mix(self, layer: RoutedExperts, x_TH: torch.Tensor, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor) -> torch.Tensor:
        backend, form, alone = self.plain or self.format.backend(x_TH.device), self.scale_format, self.split.ranks == 1
        summed = self.exact and not alone  # else vLLM's runner adds the ranks' rounded sums

        def matrices(expert: int) -> ExpertWeights:
            return ExpertWeights(*(self._matrix(layer, expert, shard_id) for shard_id in _SHARDS))

        if self.capture is not None:
            self.capture(ids_Tk)
        x = backend.quantize_activation(x_TH, form)
        kernels = backend.grouped(x_TH)
        if kernels is None:
            sizes = (self.experts, x_TH.shape[1])
            mine_1TH = run_experts(x, weights_Tk, ids_Tk, matrices, sizes, backend, held=self.held)
            return sum_over_ranks(mine_1TH[0]) if summed else added(mine_1TH)
        if not alone:  # -1 marks experts of other ranks
            ids_Tk = torch.where((ids_Tk >= self.held.start) & (ids_Tk < self.held.stop), ids_Tk - self.held.start, -1)
        stacks = self.stacks(layer, kernels)
        dtype = torch.float32 if summed else torch.bfloat16
        y_TH, *_ = run_grouped(kernels, x, weights_Tk, ids_Tk, stacks, part=None if alone else dtype)
        return sum_over_ranks(y_TH) if summed else y_TH

    def _matrix(self, layer: RoutedExperts, expert: int, shard_id: str) -> Quantized:
        weight, scale, _ = self.piece(layer, expert, shard_id)
        if self.plain is not None:
            return self.plain.quantize_weight(weight, self.scale_format)
        assert scale is not None
        return Quantized(weight, scale, "rows", self.scale_format)

    def _load_weight(self, piece: Piece, loaded: torch.Tensor) -> None:
        name, scales = piece.shard.name, None
        if self.plain is not None:
            loaded = finite_bf16(name, loaded)
        elif loaded.dtype != FP8:  # quantize the whole matrix: its bytes must not depend on the split
            loaded, scales = self.format.quantize(finite_bf16(name, loaded).to(piece.weight.device).contiguous())
        self._copy(f"{name}.weight", piece.weight, loaded, piece.shard, piece.shard.col0)
        if scales is not None:
            self._load_scale(piece, scales)

    def _load_scale(self, piece: Piece, loaded: torch.Tensor) -> None:
        shard = piece.shard
        assert piece.scale is not None
        rows = self.format.scales.per_row(loaded, shard.rows, shard.name)
        self._copy(f"{shard.name}.weight_scale_inv", piece.scale, rows, shard, shard.col0 // BLOCK)

    def _copy(self, name: str, place: torch.Tensor, whole: torch.Tensor, shard: Shard, col0: int) -> None:
        """Copy this rank's part of a matrix or of its scales. Raises SyncError if the whole matrix has the wrong shape."""
        k = place.shape[1]
        required = [shard.rows, k * self.parts if shard.shard_id == "w2" else k]
        if list(whole.shape) != required:
            fix = "use the same model on both sides"
            raise SyncError(explain(name, required=f"shape {required}", found=list(whole.shape), fix=fix))
        place.copy_(whole[shard.row0 : shard.row1, col0 : col0 + k])
        self._unwritten.discard(name)


def _check(layer: RoutedExperts, exact: bool) -> None:
    parallel = layer.moe_config.moe_parallel_config
    problems = {
        f"activation {layer.activation.value!r}": layer.activation != MoEActivation.SILU,
        "routing weights on the input": layer.apply_router_weight_on_input,
        "experts shared between engines": parallel.dp_size * parallel.pcp_size > 1,
        "redundant experts": parallel.enable_eplb,
        f"experts placed by {layer.expert_placement_strategy}": layer.expert_placement_strategy != "linear",
    }
    if exact:
        corrected, grouped = layer.e_score_correction_bias is not None, layer.use_grouped_topk
        by_softmax = not (layer.scoring_func == "sigmoid" and grouped and corrected)
        problems |= {
            f"scores by {layer.scoring_func}": by_softmax and layer.scoring_func != "softmax",
            "experts chosen by groups": by_softmax and grouped,
            "a bias that corrects scores": by_softmax and corrected,
            "a routing function of its own": layer.custom_routing_function is not None,
            f"routing weights scaled by {layer.routed_scaling_factor}": layer.routed_scaling_factor != 1.0,
        }
    found = [what for what, there in problems.items() if there]
    if found:
        raise ModelError(
            explain(
                f"the experts of {layer.layer_name}",
                required="SiLU, a router that picks the top experts by softmax, or by sigmoid with a bias, and experts in order "
                "over the ranks of one engine",
                found=", ".join(found),
                fix=f"turn it off, use another model, or {UNQUANTIZED}",
            )
        )


def expert_modules(model: torch.nn.Module) -> list[tuple[RoutedExperts, QuantizedExpertsMethod]]:
    """Return the experts of a built vLLM model with their methods, including BF16 experts, in module order."""
    return [
        (module, method)
        for module in model.modules()
        if isinstance(module, RoutedExperts)
        and isinstance(method := getattr(module, "quant_method", None), QuantizedExpertsMethod)
    ]


def check_eager(model: torch.nn.Module, eager: bool) -> None:
    """Raise ModelError for BF16 experts in graphs on a GPU: only experts that have tokens run, so launches vary."""
    for layer, method in expert_modules(model):
        if method.plain is not None and layer.w2_weight.device.type != "cpu" and not eager:
            what = f"{method.prefix} in BF16 on a GPU"
            fix = "set enforce_eager=True without decode_graphs, or do not exclude experts"
            raise ModelError(explain(what, required="an eager engine", found="captured graphs", fix=fix))
