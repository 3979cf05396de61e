"""Part b: every kernel relative to BF16, to ceilings of the same run, and to the targets (``targets``).

M rows, N output and K input features. Attention: T tokens of a sequence, B sequences, L tokens of context, D head width. A causal
forward pass takes 4 D heads FLOPs for each pair of a query and a key that it sees; forward and backward take 3.5 times as many.
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

from benchmarks.harness import extra_memory
from benchmarks.hopper.device import CEILINGS, Call, Machine, this_machine, tiny_machine
from benchmarks.hopper.record import Piece, Record, Setup, Table
from benchmarks.hopper.targets import BF16, COMPILED, FUSED, QUANTIZED, QUANTIZERS, TITLES, TWO_LAYOUTS, targets
from benchmarks.shapes import DECODE, MODELS, TRAIN, Linear, Model, gemm_bytes
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.exact import dispatch, flash3, ops
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.kernels.formats import ScaleFormat
from scripts.tables import Row

FORMAT: ScaleFormat = "pow2"
EPS = 1e-6
EXACT, SDPA, FLASH3, EXACT3 = "exact", "SDPA", "FlashAttention-3", "exact, FlashAttention-3"
#: tokens in a block of the KV cache
PAGE = 16


class Sizes(NamedTuple):
    """What is measured, the sizes of the targets first. Of attention: (sequences, tokens of each)."""

    model: Model = MODELS[1]
    train: Sequence[int] = TRAIN[::-1]
    decode: Sequence[int] = (64, *(M for M in DECODE if M != 64))
    quantized: Sequence[tuple[int, int]] = QUANTIZED
    trained: Sequence[tuple[int, int]] = ((4, 4096), (2, 8192), (1, 32768))
    decoded: Sequence[tuple[int, int]] = tuple((B, L) for L in (8192, 16384, 32768) for B in (64, 16, 1))


TINY = Sizes(
    Model("tiny", hidden=128, intermediate=256, heads=2, kv_heads=1, head_dim=64),
    (256,), (16, 1), ((16, 128),), ((2, 16),), ((2, 32),),
)  # fmt: skip


def pieces(setup: Setup) -> Iterator[Piece]:
    """What the targets need comes first, because a command may run out of time."""
    machine, sizes = (tiny_machine(), TINY) if setup.dry else (this_machine(setup.deep_gemm), Sizes())
    setup.record.missing = machine.missing
    for name in CEILINGS:
        machine.ceilings |= {row["ceiling"]: row["measured"] for row in setup.record.rows.get(name, ())}
        yield Piece("Ceilings of this device", name, partial(machine.measure_ceiling, name))
    for table, key, function, *arguments in measurements(machine, sizes):
        yield Piece(TITLES[table], ", ".join(map(str, (table, *key))), partial(function, machine, *arguments))


def measurements(machine: Machine, sizes: Sizes) -> Iterator[tuple[Any, ...]]:
    """The table, what distinguishes the measurement from others, and the function that measures it, with arguments."""
    model = sizes.model
    yield "blocks", (), _block, model, sizes.train[0]
    for i in range(max(map(len, (sizes.train, sizes.decode, sizes.quantized)))):
        for M in sizes.train[i : i + 1]:
            for linear in model.linears:
                yield "products", (linear.name, M), _products, linear, M
                yield "layers", (linear.name, M), _layer, linear, M
        for M in sizes.decode[i : i + 1]:
            yield "decode", (M,), _decode, model, M
        for M, K in sizes.quantized[i : i + 1]:
            for name in machine.backends:
                yield "quantizers", (name, M, K), _quantizers, name, M, K
    for B, T in sizes.trained:
        yield "attention", ("training", B, T), _training_attention, model, B, T
    for B, L in sizes.decoded:
        yield "attention", ("decode", B, L), _decoding_attention, model, B, L


def derive(record: Record) -> list[Table]:
    tables = record.tables()
    return [("Targets", targets({name: tables.get(title, []) for name, title in TITLES.items()}), "")]


# ---- Rows of a table ------------------------------------------------------------------------------------------------


#: column -> amount of work, how many make its unit, and the ceiling
Work = dict[str, tuple[float, float, str]]


def arithmetic(flops: float, kind: str = "BF16") -> Work:
    return {"TFLOP/s": (flops, 1e12, f"{kind} TFLOP/s")}


def traffic(size: float) -> Work:
    return {"GB/s": (size, 1e9, "copy GB/s")}


def timed_rows(
    machine: Machine, head: Row, calls: dict[str, Call], work: Callable[[str], Work] | None = None, base: Sequence[str] = (BF16,)
) -> Iterator[Row]:
    """One row for each way: time, speed, share of its ceiling, ratio to the fastest of ``base`` in the same turns, memory."""
    times = machine.timer(calls)
    fastest = min((times[way].seconds for way in base if way in times and not times[way].error), default=math.nan)
    for way, timed in times.items():
        row = {**head, "way": way, "us": timed.seconds * 1e6}
        if work is not None:
            speeds = {name: amount / timed.seconds / scale for name, (amount, scale, _) in work(way).items()}
            shares = [speed / machine.ceilings.get(work(way)[name][2], math.nan) for name, speed in speeds.items()]
            row |= {**speeds, "of the ceiling": math.nan if any(map(math.isnan, shares)) else max(shares)}
        row["BF16 / this"] = fastest / timed.seconds
        if COMPILED in times:
            row["compiled BF16 / this"] = times[COMPILED].seconds / timed.seconds
        counted = machine.device.type == "cuda" and not timed.error
        peak = extra_memory(partial(calls[way], 0), "cuda") / 2**20 if counted else ""
        yield {**row, "peak MiB": peak, "note": timed.note}


def backward(run: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Forward and backward from new leaves, because layers cache their last quantized input."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.autograd.grad(run(*leaves), [*leaves, *others], g)


# ---- Linear layers and quantizers -----------------------------------------------------------------------------------


def _products(machine: Machine, linear: Linear, M: int) -> Iterator[Row]:
    """FProp with quantized operands."""
    name, N, K = linear
    x, weights = machine.random(M, K), [machine.random(N, K) for _ in range(machine.copies(N * K))]
    calls: dict[str, Call] = {BF16: lambda i: x @ weights[i % len(weights)].t()}
    for way, backend in machine.backends.items():
        q, held = backend.quantize_activation(x, FORMAT), [backend.quantize_weight(w, FORMAT) for w in weights]
        calls[way] = lambda i, b=backend, q=q, held=held: b.gemm(q, held[i % len(held)], torch.bfloat16)

    def work(way: str) -> Work:
        fp8 = way != BF16
        return arithmetic(2 * M * N * K, "FP8" if fp8 else "BF16") | traffic(gemm_bytes(M, N, K, fp8))

    return timed_rows(machine, {"linear": name, "M": M}, calls, work)


def _layer(machine: Machine, linear: Linear, M: int) -> Iterator[Row]:
    """Forward and backward of a layer, and the bytes that it saves for backward besides its weight."""
    x, g = machine.random(M, linear.K), machine.random(M, linear.N)
    made = {way: new_linear(linear, machine.device, None if way == BF16 else way) for way in (BF16, *machine.backends)}
    calls: dict[str, Call] = {way: lambda i, l=layer: backward(l, [x], g, [l.weight]) for way, layer in made.items()}
    for row in timed_rows(machine, {"linear": linear.name, "M": M}, calls):
        yield {**row, "saved MiB": "" if math.isnan(row["us"]) else saved_mib(made[row["way"]], x)}


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
    for way, backend in machine.backends.items():
        held = [[backend.quantize_weight(w, FORMAT) for w in ws] for ws in weights]
        calls[way] = lambda i, b=backend, held=held: [b.fprop(x, ws[i % turns]) for x, ws in zip(xs, held)]
    return timed_rows(machine, {"M": M}, calls)


def _quantizers(machine: Machine, name: str, M: int, K: int) -> Iterator[Row]:
    """Bandwidth of the quantizers (bytes that must move, over time) relative to the measured copy."""
    backend, x = machine.backends[name], machine.random(M, K)
    functions = backend.quantize_activation, backend.quantize_tokens, backend.quantize_weight
    calls: dict[str, Call] = {way: lambda i, f=f: f(x, FORMAT) for way, f in zip(QUANTIZERS, functions, strict=True)}
    if isinstance(backend, GpuBackend) and (kernels := backend.quantizers(x)) is not None:
        calls[TWO_LAYOUTS] = lambda i: kernels.quantize_both(x, FORMAT, columns=backend.columns)
    for row in timed_rows(machine, {}, calls, lambda way: traffic((4 if way == TWO_LAYOUTS else 3) * M * K)):
        shown = {key: row[key] for key in ("us", "GB/s", "note")}
        yield {"way": name, "quantizer": row["way"], "M, K": f"{M}, {K}", **shown, "of the copy": row["of the ceiling"]}


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


def _block(machine: Machine, model: Model, M: int) -> Iterator[Row]:
    """A block's step in BF16, eager and compiled, with FP8 linears, and with norms and activation fused into the quantization."""
    x, g = machine.random(M, model.hidden), machine.random(M, model.hidden)
    made: dict[str, Any] = {BF16: Block(model, machine.device, None, False)}
    for name, backend in machine.backends.items():
        made[name] = Block(model, machine.device, name, False)
        if isinstance(backend, GpuBackend):
            made[name + FUSED] = Block(model, machine.device, name, True)
    if machine.compiler:
        made[COMPILED] = torch.compile(made[BF16], backend=machine.compiler)
    calls: dict[str, Call] = {way: lambda i, b=b: backward(b, [x], g, list(b.parameters())) for way, b in made.items()}
    return timed_rows(machine, {"M": M}, calls)


# ---- Attention ------------------------------------------------------------------------------------------------------


def _by_flash3(function: Callable[..., Tensor], device: torch.device, width: int) -> Callable[..., Tensor]:
    """The exact attention, computed by FlashAttention-3."""

    def by_flash3(*args: Any) -> Tensor:
        with dispatch.attention_by(flash3.FLASH3, device.type, width):
            return function(*args)

    return by_flash3


def _training_attention(machine: Machine, model: Model, B: int, T: int) -> Iterator[Row]:
    """Forward, and forward with backward, of B sequences of T tokens: exact, and as in BF16 installations."""
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

    functions: dict[str, Callable[..., Tensor]] = {EXACT: exact, SDPA: sdpa}
    functions |= {EXACT3: _by_flash3(exact, machine.device, D)} if flash is not None else {}
    forward: dict[str, Call] = {way: lambda i, f=f: torch.no_grad()(f)(q, k, v) for way, f in functions.items()}
    if flash is not None:  # vLLM's build has no backward
        forward[FLASH3] = lambda i: flash(q, k, v, T, ends, T, cu_seqlens_k=ends, softmax_scale=scale, causal=True, fa_version=3)
    both: dict[str, Call] = {way: lambda i, f=f: backward(f, [q, k, v], g) for way, f in functions.items()}
    flops = 4 * D * model.heads * B * T * (T + 1) / 2
    for what, calls, factor in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
        head = {"what": what, "sequences": B, "tokens": T}
        yield from timed_rows(machine, head, calls, lambda way, all_=factor * flops: arithmetic(all_), (SDPA, FLASH3))


def _decoding_attention(machine: Machine, model: Model, B: int, L: int) -> Iterator[Row]:
    """One new token for each of B sequences over L tokens. Each turn reads other memory, as one layer follows another."""
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
        k, v = (t.view(B, L, KH, D).transpose(1, 2) for t in caches[i % turns])  # views, because the pages are in order
        out: Tensor = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, scale=scale, enable_gqa=True)
        return out

    def three(i: int) -> Tensor:
        where = {"seqused_k": seen, "block_table": table}
        out: Tensor = flash(q, *caches[i % turns], 1, starts, L, **where, softmax_scale=scale, causal=True, fa_version=3)
        return out

    calls: dict[str, Call] = {EXACT: exact, SDPA: sdpa}
    calls |= {FLASH3: three, EXACT3: _by_flash3(exact, device, D)} if flash is not None else {}
    head = {"what": "decode", "sequences": B, "tokens": L}
    return timed_rows(machine, head, calls, lambda way: traffic(size), (SDPA, FLASH3))
