"""Part b: every kernel against BF16, against ceilings of the same run, and against the targets (``targets``).

M rows, N output and K input features. Attention: T tokens of a batch, B sequences, L tokens of context, D head width. FLOPs of a
causal forward pass are 4 D heads for each pair of a query and a key that it sees; forward and backward have 3.5 times as many.
Decoding reads 4 B L D bytes for each key/value head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Row
from benchmarks.hopper import log_probs
from benchmarks.hopper.device import Call, Machine, this_machine, tiny_machine
from benchmarks.hopper.record import Record, Table
from benchmarks.hopper.targets import BF16, COMPILED, FUSED, QUANTIZED, QUANTIZERS, TITLES, TWO_LAYOUTS, targets
from benchmarks.hopper.worker import Piece, Setup
from benchmarks.shapes import MODELS, TRAIN, VOCABULARY, Linear, Model, gemm_bytes
from jetrl_patch.backends import Backend
from jetrl_patch.backends.gpu import GpuBackend, TritonBackend
from jetrl_patch.exact import dispatch, flash3, ops
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.kernels.formats import ScaleFormat

FORMAT: ScaleFormat = "pow2"
EPS = 1e-6
ONE_LAUNCH, TWO_LAUNCHES = "triton, one launch", "triton, two launches"
#: rows that the one-launch kernel takes at most
FEW = 64
EXACT, SDPA, FLASH3, EXACT3 = "exact", "SDPA", "FlashAttention-3", "exact, FlashAttention-3"
#: tokens in a block of the KV cache
PAGE = 16
#: profiled steps, and kernels listed per step
STEPS, TOP = 3, 12


class Sizes(NamedTuple):
    """What is measured. Rows of training batches are in descending order, because the targets are at the most.

    Attributes:
        chosen: the model of what is measured for one alone.
        trained, contexts: of attention: sequences and tokens of each; decode batches have ``batches`` sequences.
        scored: tokens of a training batch whose logits are taken at once.
        side: of the matrices for the ceilings.
    """

    models: Sequence[Model] = MODELS
    chosen: Model = MODELS[1]
    train: Sequence[int] = tuple(sorted(TRAIN, reverse=True))
    decode: Sequence[int] = (64, 1, 8, 256)
    quantized: Sequence[tuple[int, int]] = tuple(sorted(QUANTIZED, reverse=True))
    trained: Sequence[tuple[int, int]] = ((4, 4096), (2, 8192), (1, 32768))
    batches: Sequence[int] = (64, 16, 1)
    contexts: Sequence[int] = (8192, 16384, 32768)
    scored: int = 8192
    vocabulary: int = VOCABULARY
    side: int = 8192


_TINY = Model("tiny", hidden=128, intermediate=256, heads=2, kv_heads=1, head_dim=64)
TINY = Sizes(
    (_TINY,), _TINY, (256,), (16, 1), ((16, 128),), ((2, 16),), (2,), (32,), scored=16, vocabulary=64, side=64
)


def pieces(setup: Setup) -> Iterator[Piece]:
    """What the targets need comes first, so that a first command has their rows."""
    machine, sizes = (tiny_machine(), TINY) if setup.dry else (this_machine(setup.deep_gemm), Sizes())
    setup.record.missing = machine.missing
    for name in ("BF16 TFLOP/s", "FP8 TFLOP/s", "copy GB/s"):
        machine.ceilings |= {row["ceiling"]: row["measured"] for row in setup.record.rows.get(name, ())}
        yield Piece("Ceilings of this device", name, partial(machine.measure_ceiling, name, sizes.side))
    every = list(measurements(machine, sizes))
    for wanted in (True, False):
        for needed, table, key, function, *arguments in every:
            if needed == wanted:
                yield Piece(TITLES[table], ", ".join(map(str, (table, *key))), partial(function, machine, *arguments))


def measurements(machine: Machine, sizes: Sizes) -> Iterator[tuple[Any, ...]]:
    """Whether a target needs it, its table, what tells it from the others, and the function that measures it, with arguments."""
    for M in (*sizes.train, *sorted(sizes.decode, reverse=True)):
        for model in sizes.models:
            for linear in model.linears:
                key = model.name, linear.name, M
                yield sizes.train[0] == M, "products", key, _products, model, linear, M
                if M in sizes.train:
                    yield sizes.train[0] == M, "layers", key, _layer, model, linear, M
                    yield False, "gradients", key, _gradients, model, linear, M
    for M in sizes.decode:
        for model in sizes.models:
            yield sizes.decode[0] == M, "decode", (model.name, M), _decode, model, M
    for M, K in sizes.quantized:
        for name in machine.backends:
            yield sizes.quantized[0][0] == M, "quantizers", (name, M, K), _quantizers, name, M, K
    for model in sizes.models:
        yield True, "blocks", (model.name,), _block, model, sizes.train[0]
    chosen = sizes.chosen
    for L in sizes.contexts:
        for B in sizes.batches:
            yield False, "attention", (chosen.name, "decode", B, L), _decoding_attention, chosen, B, L
    for B, T in sizes.trained:
        yield False, "attention", (chosen.name, "training", B, T), _training_attention, chosen, B, T
    yield False, "head", (chosen.name, "log-probs"), _log_probs, chosen, sizes.scored, sizes.vocabulary
    yield False, "head", (chosen.name, "logits"), _logits, chosen, sizes.scored, sizes.vocabulary
    for M in sizes.decode:
        yield False, "head", (chosen.name, "logits, decode", M), _logits_decoded, chosen, M, sizes.vocabulary
    for way in ways(machine):
        yield False, "profile", (sizes.models[0].name, way), _profile, sizes.models[0], way, sizes.train[0]


def derive(record: Record) -> list[Table]:
    tables = record.tables()
    return [("Targets", targets({name: tables.get(title, []) for name, title in TITLES.items()}), "")]


# ---- Rows of a table ------------------------------------------------------------------------------------------------


class Amount(NamedTuple):
    """What a call does: FLOPs or bytes, how many make the unit of the column, and their ceiling."""

    amount: float
    unit: float
    ceiling: str


#: column -> what a call does
Work = dict[str, Amount]


def arithmetic(flops: float, kind: str = "BF16") -> Work:
    return {"TFLOP/s": Amount(flops, 1e12, f"{kind} TFLOP/s")}


def traffic(size: float) -> Work:
    return {"GB/s": Amount(size, 1e9, "copy GB/s")}


def timed_rows(
    machine: Machine, head: Row, calls: dict[str, Call], work: Callable[[str], Work] | None = None, base: Sequence[str] = (BF16,)
) -> Iterator[Row]:
    """One row for each way: time, speed, share of its ceiling, the ratio to the fastest of ``base`` in the same turns, memory."""
    times = machine.timer(calls)
    fastest = min((times[way].seconds for way in base if way in times and not times[way].error), default=math.nan)
    for way, timed in times.items():
        row = {**head, "way": way, "us": timed.seconds * 1e6}
        if work is not None:
            speeds = {name: amount / timed.seconds / scale for name, (amount, scale, _) in work(way).items()}
            shares = [speed / machine.ceilings.get(work(way)[name].ceiling, math.nan) for name, speed in speeds.items()]
            row |= {**speeds, "of the ceiling": math.nan if any(map(math.isnan, shares)) else max(shares)}
        row["BF16 / this"] = fastest / timed.seconds
        if COMPILED in times:
            row["compiled BF16 / this"] = times[COMPILED].seconds / timed.seconds
        yield {**row, "peak MiB": "" if timed.error else machine.peak_mib(partial(calls[way], 0)), "note": timed.note}


def backward(run: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Forward and backward from new leaves, because layers cache their last quantized input."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.autograd.grad(run(*leaves), [*leaves, *others], g)


# ---- Linear layers --------------------------------------------------------------------------------------------------


class _Launches(TritonBackend):
    """Quantizes within the product up to ``most`` rows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def few(self) -> int:
        return self.most


def launches(machine: Machine) -> dict[str, Backend]:
    """The Triton backend that always or never quantizes within the product of few rows, if Triton is available."""
    return {ONE_LAUNCH: _Launches(FEW), TWO_LAUNCHES: _Launches(0)} if "triton" in machine.backends else {}


def _gemm(way: str, M: int, N: int, K: int) -> Work:
    return arithmetic(2 * M * N * K, "BF16" if way == BF16 else "FP8") | traffic(gemm_bytes(M, N, K, fp8=way != BF16))


def _products(machine: Machine, model: Model, linear: Linear, M: int) -> Iterator[Row]:
    """FProp with quantized operands."""
    name, N, K = linear
    x, weights = machine.random(M, K), [machine.random(N, K) for _ in range(machine.copies(N * K))]
    calls: dict[str, Call] = {BF16: lambda i: x @ weights[i % len(weights)].t()}
    for way, backend in machine.backends.items():
        q, held = backend.quantize_activation(x, FORMAT), [backend.quantize_weight(w, FORMAT) for w in weights]
        calls[way] = lambda i, b=backend, q=q, held=held: b.gemm(q, held[i % len(held)], torch.bfloat16)
    return timed_rows(machine, {"model": model.name, "linear": name, "M": M}, calls, lambda way: _gemm(way, M, N, K))


def _gradients(machine: Machine, model: Model, linear: Linear, M: int) -> Iterator[Row]:
    """DGrad and WGrad, including their quantization."""
    name, N, K = linear
    w, x, g = machine.random(N, K), machine.random(M, K), machine.random(M, N)
    both: dict[str, dict[str, Call]] = {"DGrad": {BF16: lambda i: g @ w}, "WGrad": {BF16: lambda i: g.t() @ x}}
    for way, backend in machine.backends.items():
        qw, qx = backend.quantize_weight(w, FORMAT), backend.quantize_activation(x, FORMAT)
        both["DGrad"][way] = lambda i, b=backend, q=qw: b.dgrad(g, q, torch.bfloat16)
        both["WGrad"][way] = lambda i, b=backend, q=qx: b.wgrad(g, q, torch.bfloat16)
    for product, calls in both.items():
        head = {"model": model.name, "linear": name, "product": product, "M": M}
        yield from timed_rows(machine, head, calls, lambda way: _gemm(way, M, N, K))


def _layer(machine: Machine, model: Model, linear: Linear, M: int) -> Iterator[Row]:
    """Forward and backward of a layer, and the bytes that it saves for backward besides its weight."""
    x, g = machine.random(M, linear.K), machine.random(M, linear.N)
    made = {way: new_linear(linear, machine.device, None if way == BF16 else way) for way in (BF16, *machine.backends)}
    calls: dict[str, Call] = {way: lambda i, l=layer: backward(l, [x], g, [l.weight]) for way, layer in made.items()}
    for row in timed_rows(machine, {"model": model.name, "linear": linear.name, "M": M}, calls):
        yield {**row, "saved MiB": "" if row["us"] != row["us"] else saved_mib(made[row["way"]], x)}


def new_linear(linear: Linear, device: torch.device, backend: str | None) -> nn.Linear:
    """A linear layer in BF16, or in FP8 by a backend."""
    layer = nn.Linear(linear.K, linear.N, bias=False, dtype=torch.bfloat16, device=device)
    if backend is not None:
        layer.__class__ = Fp8Linear
        layer.fp8 = Fp8State(FORMAT, backend)  # type: ignore[assignment]
    return layer


def saved_mib(layer: nn.Module, x: Tensor) -> float:
    """MiB that the forward saves for backward besides the weight."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if all(storage.data_ptr() != p.untyped_storage().data_ptr() for p in layer.parameters()):
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.detach().requires_grad_())
    return sum(storages.values()) / 2**20


def _decode(machine: Machine, model: Model, M: int) -> Iterator[Row]:
    """The four linears of a block in sequence, from BF16: a decoding step's products with their quantization."""
    turns = machine.copies(sum(N * K for _, N, K in model.linears))
    weights = [[machine.random(N, K) for _ in range(turns)] for _, N, K in model.linears]
    xs = [machine.random(M, K) for _, _, K in model.linears]
    calls: dict[str, Call] = {BF16: lambda i: [x @ ws[i % turns].t() for x, ws in zip(xs, weights)]}
    for way, backend in {**machine.backends, **launches(machine)}.items():
        if M > FEW and way == ONE_LAUNCH:
            continue
        held = [[backend.quantize_weight(w, FORMAT) for w in ws] for ws in weights]
        calls[way] = lambda i, b=backend, held=held: [b.fprop(x, ws[i % turns]) for x, ws in zip(xs, held)]
    return timed_rows(machine, {"model": model.name, "M": M}, calls)


# ---- Quantizers -----------------------------------------------------------------------------------------------------


def _quantizers(machine: Machine, name: str, M: int, K: int) -> Iterator[Row]:
    """Bandwidth of quantizers and fused kernels (bytes that must move, over time) relative to the measured copy."""
    backend, x = machine.backends[name], machine.random(M, K)
    bytes_and_calls: dict[str, tuple[int, Callable[[], object]]] = {
        QUANTIZERS[0]: (3, lambda: backend.quantize_activation(x, FORMAT)),
        QUANTIZERS[1]: (3, lambda: backend.quantize_tokens(x, FORMAT)),
        QUANTIZERS[2]: (3, lambda: backend.quantize_weight(x, FORMAT)),
    }
    if isinstance(backend, GpuBackend):
        bytes_and_calls["tokens 128x1, transposed"] = 3, lambda: backend.quantize_transposed(x, FORMAT)
        bytes_and_calls |= _kernels_alone(backend, x)
    calls: dict[str, Call] = {way: lambda i, run=run: run() for way, (_, run) in bytes_and_calls.items()}
    for row in timed_rows(machine, {}, calls, lambda way: traffic(bytes_and_calls[way][0] * M * K)):
        shown = {key: row[key] for key in ("us", "GB/s", "note")}
        yield {"way": name, "quantizer": row["way"], "M, K": f"{M}, {K}", **shown, "of the copy": row["of the ceiling"]}


def _kernels_alone(backend: GpuBackend, x: Tensor) -> dict[str, tuple[int, Callable[[], object]]]:
    """Operations of the plugin's kernels only: both layouts from one read, fused producers, and their gradients."""
    kernels, fused = backend.quantizers(x), backend.producers(x)
    if kernels is None or fused is None:
        return {}
    from jetrl_patch.kernels.norm import rms_norm_backward
    from jetrl_patch.kernels.silu import silu_mul_backward

    columns, weight, other, rstd = backend.columns, x[0].contiguous(), torch.randn_like(x), torch.ones_like(x[:, 0]).float()
    found: dict[str, tuple[int, Callable[[], object]]] = {
        TWO_LAYOUTS: (4, lambda: kernels.quantize_both(x, FORMAT, columns=columns, pad=True)),
        "SiLU * up, kept and quantized": (7, lambda: fused.silu_mul_quantize_rows(x, other, FORMAT, columns, keep=True)),
        "SiLU * up, backward": (10, lambda: silu_mul_backward(x, other, x, (torch.bfloat16, torch.bfloat16))),
    }
    if x.shape[1] <= fused.WIDEST:
        norm = x, weight, rstd, other, torch.bfloat16, True
        found |= {
            "RMSNorm, kept and quantized": (
                5, lambda: fused.rmsnorm_quantize_rows(x, weight, EPS, FORMAT, keep=True, columns=columns),
            ),
            "RMSNorm, backward": (6, lambda: rms_norm_backward(*norm)),
            "RMSNorm, backward, and the residual's": (8, lambda: rms_norm_backward(*norm, other)),
        }  # fmt: skip
    return found


# ---- A block without attention --------------------------------------------------------------------------------------


class Block(nn.Module):
    """norm, qkv, o, norm, gate and up, SiLU * up, down, with both residuals; o reads the queries in place of attention.

    Args:
        backend: backend of the FP8 linears; None means BF16.
        fused: whether norms and SiLU * up return quantized rows.
    """

    def __init__(self, model: Model, device: torch.device, backend: str | None, fused: bool) -> None:
        super().__init__()
        self.state = Fp8State(FORMAT, backend) if backend and fused else None
        ones = torch.ones(2, model.hidden, dtype=torch.bfloat16, device=device)
        self.norms = nn.ParameterList([nn.Parameter(row) for row in ones])
        for linear in model.linears:
            self.add_module(linear.name, new_linear(linear, device, backend))
        self.attention = model.heads * model.head_dim

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self._norm(x, 0)
        q = self.qkv(y)[..., : self.attention]
        y, residual = self._norm(residual + self.o(q.contiguous()), 1)
        gate, up = self.gate_up(y).chunk(2, -1)
        y = producers.silu_mul(gate, up, self.state) if self.state else None
        down: Tensor = self.down(F.silu(gate) * up if y is None else y)
        return residual + down

    def _norm(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The norm of x, and x for the residual."""
        made = producers.rms_norm(x, self.norms[i], EPS, self.state) if self.state else None
        if made is not None:
            return made
        wide = x.float()  # as in transformers
        return self.norms[i] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype), x


def ways(machine: Machine) -> dict[str, tuple[str | None, bool]]:
    """What ``Block`` is built with, by name."""
    found: dict[str, tuple[str | None, bool]] = {BF16: (None, False)}
    for name, backend in machine.backends.items():
        found[name] = name, False
        if isinstance(backend, GpuBackend):
            found[name + FUSED] = name, True
    return found


def _block(machine: Machine, model: Model, M: int) -> Iterator[Row]:
    """A block's step in BF16, eager and compiled, with FP8 linears, and with norms and activation fused into the quantization."""
    x, g = machine.random(M, model.hidden), machine.random(M, model.hidden)
    made: dict[str, Any] = {way: Block(model, machine.device, *given) for way, given in ways(machine).items()}
    if machine.compiler:
        made[COMPILED] = torch.compile(made[BF16], backend=machine.compiler)
    calls: dict[str, Call] = {way: lambda i, b=b: backward(b, [x], g, list(b.parameters())) for way, b in made.items()}
    return timed_rows(machine, {"model": model.name, "M": M}, calls)


def _profile(machine: Machine, model: Model, way: str, M: int) -> Iterator[Row]:
    """The kernels of a block's step from torch's profiler, longest first: time, calls and share of the step."""
    cuda = machine.device.type == "cuda"
    x, g = machine.random(M, model.hidden), machine.random(M, model.hidden)
    block = Block(model, machine.device, *ways(machine)[way])
    parameters = list(block.parameters())
    backward(block, [x], g, parameters)  # compiles
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        for _ in range(STEPS):
            backward(block, [x], g, parameters)
        if cuda:
            torch.cuda.synchronize()
    times = [
        (event.self_device_time_total if cuda else event.self_cpu_time_total, event.count, event.key)
        for event in found.key_averages() if not cuda or event.device_type == DeviceType.CUDA
    ]  # fmt: skip
    times.sort(reverse=True)
    if rest := times[TOP:]:
        times[TOP:] = [(sum(us for us, _, _ in rest), sum(count for _, count, _ in rest), f"{len(rest)} others")]
    whole = sum(us for us, _, _ in times) or math.nan
    for us, count, kernel in times:
        head = {"model": model.name, "way": way, "M": M, "kernel": kernel[:90]}
        yield {**head, "us": us / STEPS, "calls": count / STEPS, "share": us / whole}


# ---- Attention ------------------------------------------------------------------------------------------------------


def _training_attention(machine: Machine, model: Model, B: int, T: int) -> Iterator[Row]:
    """Forward, and forward with backward, of B sequences of T tokens: exact, and as BF16 installations have it."""
    D, scale = model.head_dim, model.head_dim**-0.5
    q, g = (machine.random(B * T, model.heads, D) for _ in range(2))
    k, v = (machine.random(B * T, model.kv_heads, D) for _ in range(2))
    ends = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=machine.device)
    flash: Any = flash3.find()[0]

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention_varlen(q, k, v, ends, scale)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.view(B, T, -1, D).transpose(1, 2) for t in (q, k, v))
        out: Tensor = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(B * T, -1, D)

    def exact3(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with dispatch.attention_by(flash3.FLASH3, q.device.type, D):
            return exact(q, k, v)

    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {EXACT: exact, SDPA: sdpa}
    functions |= {EXACT3: exact3} if flash is not None else {}
    forward: dict[str, Call] = {way: lambda i, f=f: torch.no_grad()(f)(q, k, v) for way, f in functions.items()}
    if flash is not None:  # vLLM's build has no backward
        forward[FLASH3] = lambda i: flash(q, k, v, T, ends, T, cu_seqlens_k=ends, softmax_scale=scale, causal=True, fa_version=3)
    both: dict[str, Call] = {way: lambda i, f=f: backward(f, [q, k, v], g) for way, f in functions.items()}
    flops = 4 * D * model.heads * B * T * (T + 1) / 2
    for what, calls, factor in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
        head = {"model": model.name, "what": what, "sequences": B, "tokens": T}
        yield from timed_rows(machine, head, calls, lambda way, all_=factor * flops: arithmetic(all_), (SDPA, FLASH3))


def _decoding_attention(machine: Machine, model: Model, B: int, L: int) -> Iterator[Row]:
    """One new token for each of B sequences over L tokens; other memory is read in each turn, as layers follow one another."""
    D, KH, scale, device = model.head_dim, model.kv_heads, model.head_dim**-0.5, machine.device
    size, pages = 4 * B * L * KH * D, B * (L // PAGE)
    turns = machine.copies(size)
    table = torch.arange(pages, dtype=torch.int32, device=device).view(B, -1)
    caches = [(machine.random(pages, PAGE, KH, D), machine.random(pages, PAGE, KH, D)) for _ in range(turns)]
    q, starts = machine.random(B, model.heads, D), torch.arange(B + 1, dtype=torch.int32, device=device)
    seen = torch.full((B,), L, dtype=torch.int32, device=device)
    flash: Any = flash3.find()[0]

    def exact(i: int) -> Tensor:
        return ops.attention_paged(q, *caches[i % turns], table, seen, starts, scale)

    def sdpa(i: int) -> Tensor:
        k, v = (t.view(B, L, KH, D).transpose(1, 2) for t in caches[i % turns])  # views, since the pages lie in order
        out: Tensor = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True)
        return out

    def exact3(i: int) -> Tensor:
        with dispatch.attention_by(flash3.FLASH3, q.device.type, D):
            return exact(i)

    def three(i: int) -> Tensor:
        where = {"seqused_k": seen, "block_table": table}
        out: Tensor = flash(q, *caches[i % turns], 1, starts, L, **where, softmax_scale=scale, causal=True, fa_version=3)
        return out

    calls: dict[str, Call] = {EXACT: exact, SDPA: sdpa} | ({FLASH3: three, EXACT3: exact3} if flash is not None else {})
    head = {"model": model.name, "what": "decode", "sequences": B, "tokens": L}
    return timed_rows(machine, head, calls, lambda way: traffic(size), (SDPA, FLASH3))


# ---- lm_head and the log-probs of tokens ----------------------------------------------------------------------------


def _head_products(x: Tensor, weights: Sequence[Tensor]) -> dict[str, Call]:
    return {
        BF16: lambda i: x @ weights[i % len(weights)].t(),
        EXACT: lambda i: ops.head_linear(x, weights[i % len(weights)]),
    }


def _logits_decoded(machine: Machine, model: Model, M: int, vocabulary: int) -> Iterator[Row]:
    copies = machine.copies(2 * vocabulary * model.hidden)
    calls = _head_products(machine.random(M, model.hidden), [machine.random(vocabulary, model.hidden) for _ in range(copies)])
    return timed_rows(machine, {"model": model.name, "what": "logits, decode", "M": M}, calls)


def _logits(machine: Machine, model: Model, M: int, vocabulary: int) -> Iterator[Row]:
    x, w, g = machine.random(M, model.hidden), machine.random(vocabulary, model.hidden), machine.random(M, vocabulary)
    both: dict[str, Callable[..., Tensor]] = {BF16: lambda x, w: x @ w.t(), EXACT: ops.head_linear}
    calls: dict[str, Call] = {way: lambda i, f=f: backward(f, [x, w], g) for way, f in both.items()}
    for what, timed in (("logits", _head_products(x, [w])), ("logits, forward and backward", calls)):
        yield from timed_rows(machine, {"model": model.name, "what": what, "M": M}, timed)


def _log_probs(machine: Machine, model: Model, M: int, vocabulary: int) -> Iterator[Row]:
    """BF16's are verl's formula, which ``what`` names; compiled is the plain one."""
    logits, ones = 4 * machine.random(M, vocabulary), torch.ones(M, device=machine.device)
    labels, (name, verl) = torch.arange(M, device=machine.device) % vocabulary, log_probs.of_verl()
    formulas = {BF16: verl, "bf16, all rows at once": log_probs.plain, EXACT: ops.token_log_probs}
    if machine.compiler:
        formulas[COMPILED] = torch.compile(log_probs.plain, backend=machine.compiler)
    calls: dict[str, Call] = {
        way: lambda i, f=f: backward(lambda leaf: f(leaf, labels).float(), [logits], ones) for way, f in formulas.items()
    }
    head = {"model": model.name, "what": f"log-probs, forward and backward (bf16: {name})", "M": M}
    return timed_rows(machine, head, calls)
