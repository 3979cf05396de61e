"""Test on this machine, before a rollout serves, that exact ops do not depend on the batch, and choose the attention."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends.row_equality import Verdict, as_verdict, require_equal
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.exact import delta_net, dispatch, flash3, kv_cache, latent, ops, tower
from jetrl_patch.exact.modules import check_kernels
from jetrl_patch.models.structure import has_latent_attention, key_heads, text_config

# ---- Test on this machine, before a rollout serves, that the exact ops do not depend on the batch
# In the ops, a row's bits depend only on that row. A compiler may break this on an untested GPU, so the trial compares each op's
# decode rows with the same rows of a packed batch. For CPUs the test suite does this.

#: lengths of the packed sequences: tile edges, partial tiles, and a long one with many key blocks in three chunks
LENGTHS = (1, 33, 130, 64, 517, 8, 2050)
#: more batches for attention: a context that many programs may share, and more requests than a launch has places for. With 64
#: heads of 128 on a rank, they take about 3 GB for less than a second
LARGE = ((32768,), tuple(1 + r % 33 for r in range(1000)))
#: (first row, rows) of the parts of a batch that are computed separately
PARTS = ((0, 1), (129, 1), (5, 7), (64, 64), (130, 256))
#: tokens per block of the trial's cache, unless the engine's size is given
PAGE = 16
#: columns of ``lm_head`` and rows of the log-softmax. Neither selects a kernel
COLUMNS, SCORED = 4096, 64
#: first row of a weight's shard on a tensor-parallel rank: inside a tile, as when eight ranks split Qwen's vocabulary
HELD = 48
#: taps of a delta net's convolution
TAPS = 4

_proven: set[tuple[object, ...]] = set()


class Sizes(NamedTuple):
    """The sizes of one tensor-parallel rank's shard of a model.

    With latent attention, keys are ``head_dim`` wide and the first ``latent`` of their numbers are the values.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    latent: int = 0

    @property
    def rotated(self) -> int:
        """The largest width of a head that the rotary embedding may rotate."""
        return self.head_dim - self.latent


class _Trial:
    def __init__(
        self, sizes: Sizes, device: torch.device | str, lengths: tuple[int, ...], page: int = PAGE, fp8_cache: bool = False,
        large: tuple[tuple[int, ...], ...] = (),
    ) -> None:  # fmt: skip
        self.sizes, self.device, self.page, self.fp8 = sizes, device, page, fp8_cache
        self.batches = (lengths, *large)
        self.tokens = sum(lengths)
        self.generator = torch.Generator(device).manual_seed(sum(sizes))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device).to(torch.bfloat16)

    def integers(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def rows(self, call: Callable[[slice], Tensor], total: int) -> str:
        """Compare the rows that ``call`` computes from the whole batch with those from parts of it."""
        whole = call(slice(0, total))
        for start, count in PARTS:
            part = slice(start, start + count)
            if part.stop <= total:
                require_equal(call(part), whole[part], f"values: {count} rows differ from those of {total}")
        return f"equal bits in batches of 1 to {total} rows"

    def norm(self, width: int) -> str:
        x, w = self.random(self.tokens, width), self.random(width)
        return self.rows(lambda part: ops.rms_norm(x[part], w, 1e-6), self.tokens)

    def silu(self) -> str:
        both = self.random(self.tokens, 2 * self.sizes.intermediate)
        return self.rows(lambda part: ops.silu_mul(*both[part].chunk(2, 1)), self.tokens)

    def rotary(self) -> str:
        """Compare also with Hugging Face's expression, and with the trainer's kernel for it if there is one."""
        x = self.random(self.tokens, self.sizes.heads, self.sizes.rotated)
        frequencies = 1e4 ** (-torch.arange(0, self.sizes.rotated, 2) / self.sizes.rotated)
        cos, sin = (t.to(self.device) for t in ops.rotary_table(frequencies, self.tokens))
        places = torch.arange(self.tokens, device=self.device)
        c, s = (torch.cat((t, t), -1).unsqueeze(1) for t in (cos, sin))
        low, high = x.chunk(2, -1)
        ours, theirs = ops.apply_rotary(x, cos, sin, places), x * c + torch.cat((-high, low), -1) * s
        by_head = x.transpose(0, 1)[None]
        pair = ops.rotate_pair(by_head, by_head, c.squeeze(1)[None], s.squeeze(1)[None]) or ()
        for trainers in (theirs, *(y[0].transpose(0, 1) for y in pair)):
            require_equal(ours, trainers, "values: differ from the trainer's")
        return self.rows(lambda part: ops.apply_rotary(x[part], cos, sin, places[part]), self.tokens)

    def head(self, dtype: torch.dtype) -> str:
        hidden = self.sizes.hidden
        x, w = self.random(self.tokens, hidden), self.random(min(self.sizes.vocab, COLUMNS), hidden)
        product = ops.linear if dtype == torch.bfloat16 else ops.partial_sum
        found = self.rows(lambda part: product(x[part], w), self.tokens)
        whole = product(x[:SCORED], w)[:, HELD:]
        shard = product(x[:SCORED], w[HELD:].contiguous())
        require_equal(shard, whole, f"values: differ for a rank that holds rows from {HELD} on")
        return found

    def log_probs(self) -> str:
        logits = self.random(SCORED, self.sizes.vocab) * 4
        labels = torch.arange(SCORED, device=self.device) % self.sizes.vocab
        return self.rows(lambda part: ops.token_log_probs(logits[part], labels[part], 0.7), SCORED)

    def attention(self) -> str:
        formulas = dispatch.serving(torch.device(self.device).type) == "torch"  # which hold all scores of a sequence
        for lengths in self.batches[:1] if formulas else self.batches:
            self.sequences(lengths)
        if s := self.sizes.latent:  # its weight makes keys and values of 128, in DeepSeek's models
            weight = self.random(self.sizes.heads * 256, s)
            x = self.random(self.tokens, self.sizes.heads, 128)
            self.rows(lambda part: latent.out_of_latent(latent.into_latent(x[part], weight), weight, 128), self.tokens)
        return "equal bits in decode steps, chunks, prompts and packed batches"

    def sequences(self, lengths: tuple[int, ...]) -> None:
        """Compare packed sequences with decode steps, chunks and prompts over a paged cache, and the first with each alone."""
        s, scale, tokens = self.sizes, self.sizes.head_dim**-0.5, sum(lengths)
        ends = [0, *itertools.accumulate(lengths)]
        q = self.random(tokens, s.heads, s.head_dim)
        k, v = (self.random(tokens, s.kv_heads, s.head_dim) for _ in range(2))
        v = k[..., : s.latent] if s.latent else v
        trained = ops.attention_varlen(q, k, v, self.integers(ends), scale, self.fp8)
        cache, scales, table = self.pages(k, v, lengths)
        plans = {
            "a decode step": [(n, 1) for n in lengths],
            "chunks": [(-(-n * 2 // 3), -(-n // 2)) for n in lengths],
            "whole prompts": [(n, n) for n in lengths],
        }
        for what, plan in plans.items():
            rows = [range(ends[r] + seen - fresh, ends[r] + seen) for r, (seen, fresh) in enumerate(plan)]
            picked = torch.tensor([row for part in rows for row in part], device=self.device)
            starts = [0, *itertools.accumulate(fresh for _, fresh in plan)]
            seen_now = self.integers([seen for seen, _ in plan])
            step = (table, seen_now, self.integers(starts), scale)
            out = ops.attention_paged(q[picked], *cache, *step, scales=scales)
            where = f"values: differ between {what} over a paged cache and a packed batch of {len(lengths)} sequences"
            require_equal(out, trained[picked], where)
        for a, b in itertools.pairwise(ends[: len(LENGTHS) + 1]):
            alone = ops.attention_varlen(q[a:b], k[a:b], v[a:b], self.integers([0, b - a]), scale, self.fp8)
            where = f"values: differ between a sequence of {b - a} alone and in a packed batch"
            require_equal(alone, trained[a:b], where)

    def tower(self, heads: int) -> str:
        """Compare images in one batch with each image alone, in a tower whose width is ``sizes.hidden``."""
        ends, width = [0, *itertools.accumulate(self.batches[0])], self.sizes.hidden // heads
        q, k, v = (self.random(self.tokens, heads, width) for _ in range(3))
        whole = tower.whole_attention(q, k, v, self.integers(ends), width**-0.5)
        for a, b in itertools.pairwise(ends):
            alone = tower.whole_attention(q[a:b], k[a:b], v[a:b], self.integers([0, b - a]), width**-0.5)
            require_equal(alone, whole[a:b], f"values: differ between an image of {b - a} patches alone and in a batch")
        x, w = self.random(self.tokens, self.sizes.hidden), self.random(self.sizes.hidden)

        def made(part: slice) -> Tensor:
            return tower.rounded_once(lambda x, w: F.gelu(F.layer_norm(x, w.shape, w), approximate="tanh"), x[part], w)

        return self.rows(made, self.tokens)

    def pages(
        self, k: Tensor, v: Tensor, lengths: tuple[int, ...]
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None, Tensor]:
        """A paged cache, its scales if it is FP8, and its table: sequences in blocks in random order, NaN in unwritten slots."""
        page = self.page
        needs = [-(-n // page) for n in lengths]
        blocks = iter(torch.randperm(sum(needs), generator=torch.Generator().manual_seed(0)).tolist())
        rows = [list(itertools.islice(blocks, need)) for need in needs]
        table = self.integers([row + [0] * (max(needs) - len(row)) for row in rows])
        slots = [row[t // page] * page + t % page for row, n in zip(rows, lengths, strict=True) for t in range(n)]
        written = torch.tensor(slots, device=k.device)
        if self.fp8:
            size = page * k.shape[1] * (2 * k.shape[2] + 8)
            raw = torch.full((sum(needs), size), 0xFF, dtype=torch.uint8, device=k.device)  # NaN as e4m3 and as FP32
            pages = kv_cache.Pages.of(raw, *k.shape[1:])
            pages.store(k, v, written)
            return pages[:2], pages[2:], table
        caches = torch.full((2, sum(needs) * page, *k.shape[1:]), float("nan"), dtype=k.dtype, device=k.device)
        caches[0, written], caches[1, written, :, : v.shape[2]] = k, v
        k_cache, v_cache = caches.unflatten(1, (-1, page))
        if self.sizes.latent:
            v_cache = k_cache[..., : self.sizes.latent]
        return (k_cache, v_cache), None, table


    def delta_net(self, shape: delta_net.Sizes) -> str:
        """Compare packed sequences with steps over a pool of states, and with each alone; and rows of the norms around."""
        (KH, H, K, V), T, lengths = shape, self.tokens, self.batches[0]
        C, ends = 2 * KH * K + H * V, [0, *itertools.accumulate(lengths)]
        x, a, b = self.random(T, C), self.random(T, H), self.random(T, H)
        weights = self.random(C, TAPS), self.random(H), self.random(H)
        trained = delta_net.delta_net(x, (a, b), weights, self.integers(ends), shape)
        count = len(lengths)
        taps = torch.full((count + 1, (TAPS - 1) * C), float("nan"), dtype=x.dtype, device=x.device)
        states = taps, torch.full((count + 1, H * K * V), float("nan"), dtype=torch.float32, device=x.device)
        halves = [(0, n // 2) for n in lengths], [(n // 2, n - 1) for n in lengths]
        for spans in (*halves, [(n - 1, n) for n in lengths]):
            live = [r for r, (begin, end) in enumerate(spans) if begin < end]
            picked = torch.tensor([ends[r] + t for r in live for t in range(*spans[r])], device=x.device)
            starts = self.integers([0, *itertools.accumulate(spans[r][1] - spans[r][0] for r in live)])
            fresh = torch.tensor([spans[r][0] == 0 for r in live], device=x.device)
            slots = self.integers([count - r for r in live])
            gates = a[picked], b[picked]
            found = delta_net.delta_net_paged(x[picked], gates, weights, starts, shape, states, slots, fresh)
            require_equal(found, trained[picked], f"values: differ between a step of {len(picked)} tokens and a packed batch")
        for begin, end in itertools.pairwise(ends):
            rows, one = slice(begin, end), self.integers([0, end - begin])
            alone = delta_net.delta_net(x[rows], (a[rows], b[rows]), weights, one, shape)
            require_equal(alone, trained[rows], f"values: differ between a sequence of {end - begin} alone and in a packed batch")
        for width in (self.sizes.hidden, self.sizes.head_dim):
            y, w = self.random(T, width), self.random(width)
            self.rows(lambda part: ops.rms_norm(y[part], w, 1e-6, one_plus=True), T)  # noqa: B023
        z, w = self.random(T, H, V), self.random(V)
        return self.rows(lambda part: ops.silu_mul(z[part], ops.rms_norm(trained[part], w, 1e-6)), T)


def _tried(call: Callable[[], str]) -> Verdict:
    try:
        return as_verdict(call)()
    except Exception as error:  # a compiler, a library or a driver may raise anything
        return Verdict(False, f"{type(error).__name__}: {error}")


@torch.no_grad()
def compare_attention(
    heads: tuple[int, int], head_dim: int, device: torch.device | str, page: int = PAGE, lengths: tuple[int, ...] = LENGTHS,
    fp8_cache: bool = False, large: tuple[tuple[int, ...], ...] = (),
) -> Verdict:  # fmt: skip
    """The verdict of ``compare_ops`` on attention, with ``heads`` query and key/value heads. The default device may be any."""
    with torch.device("cpu"):
        return _tried(_Trial(Sizes(0, 0, *heads, head_dim, 0), device, lengths, page, fp8_cache, large).attention)


@torch.no_grad()
def compare_ops(
    sizes: Sizes, device: torch.device | str, lengths: tuple[int, ...] = LENGTHS, page: int = PAGE, fp8_cache: bool = False,
    large: tuple[tuple[int, ...], ...] = (),
) -> Iterator[tuple[str, Verdict]]:  # fmt: skip
    """Yield each op's name and verdict, on any device. Waits for the device, so do not call it during graph capture.

    ``lengths`` are those of the packed sequences of a batch, ``large`` those of more batches for attention.
    """
    trial = _Trial(sizes, device, lengths, page, fp8_cache, large)
    tried: dict[str, Callable[[], str]] = {
        "attention": trial.attention,
        f"RMSNorm of width {sizes.hidden}": partial(trial.norm, sizes.hidden),
        f"RMSNorm of width {sizes.latent or sizes.head_dim}": partial(trial.norm, sizes.latent or sizes.head_dim),
        "SiLU": trial.silu,
        "rotary embedding": trial.rotary,
        "lm_head": partial(trial.head, torch.bfloat16),
        "BF16 partial sums": partial(trial.head, torch.float32),
        f"log-softmax over {sizes.vocab}": trial.log_probs,
    }
    for name, call in tried.items():
        yield name, _tried(call)


@torch.no_grad()
def require_exact_tower(hidden: int, heads: int, device: torch.device, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Test the attention, the norms and the activations of a vision tower with ``heads`` heads; never on a CPU.

    Raises ModelError if an image's features would depend on other images, or an op cannot run.
    """
    if device.type != "cpu":
        call = partial(_Trial(Sizes(hidden, 0, 0, 0, 0, 0), device, lengths).tower, heads)
        _require(device, "vision tower", "features of an image that do not depend on the batch", _tried(call))


@torch.no_grad()
def require_exact_delta_net(
    shape: delta_net.Sizes, sizes: Sizes, device: torch.device, lengths: tuple[int, ...] = LENGTHS
) -> None:
    """Test gated delta nets, and norms that multiply by 1 + weight; never on a CPU. Raises as ``require_exact_ops``."""
    key = (*shape, *sizes, str(device))
    if device.type != "cpu" and key not in _proven:
        _require(device, "gated delta net", ROWS, _tried(partial(_Trial(sizes, device, lengths).delta_net, shape)))
        _proven.add(key)


#: what the trial requires of an op
ROWS = "rows that do not depend on the batch"


def _require(device: torch.device, name: str, required: str, verdict: Verdict) -> None:
    if not verdict.ok:
        what, fix = f"align='exact' on {device}, {name}", "use align='linear' (only the FP8 linears are the same)"
        raise ModelError(explain(what, required=required, found=verdict.found, fix=fix))


def require_exact_ops(sizes: Sizes, device: torch.device, page: int = PAGE, fp8_cache: bool = False) -> None:
    """Run ``compare_ops`` once per process for each device and set of sizes; never on a CPU.

    Raises ModelError if an op depends on the batch or cannot run. Rollout and trainer would disagree.
    """
    key = (*sizes, page, fp8_cache, str(device))
    if device.type == "cpu" or key in _proven:
        return
    for name, verdict in compare_ops(sizes, device, LENGTHS, page, fp8_cache, LARGE):
        _require(device, name, ROWS, verdict)
    torch.cuda.empty_cache()
    _proven.add(key)


# ---- Choose the attention of exact mode on a GPU: the project's kernel, or FlashAttention-3 if its rows are equal

logger = logging.getLogger(__name__)

#: (device, heads, head width, page) -> why FlashAttention-3 cannot be used; "" if it can
_attention_tried: dict[tuple[object, ...], str] = {}


def choose_attention(asked: str, heads: tuple[int, int], head_dim: int, device: torch.device, page: int = PAGE) -> str:
    """Choose what computes attention with this head width. Both sides of a run must agree, which a weight sync checks.

    The trial runs once per process and set of sizes.

    Args:
        asked: ``Config.resolved_attention``.
        heads: number of query heads, and of key/value heads, on one rank.
        page: tokens per block of the cache.

    Returns:
        ``flash3.FLASH3``, or "" for the implementation's own attention (``dispatch.implementation``).

    Raises ConfigError if the setting names FlashAttention-3, which cannot be used here.
    """
    chosen = ""
    if device.type != "cpu" and asked != "triton":
        found = _problem(heads, head_dim, device, page)
        if not found:
            chosen = flash3.FLASH3
            logger.info("jetrl_patch: exact attention by FlashAttention-3, whose rows are equal on this GPU")
        elif asked == flash3.FLASH3:
            required = "FlashAttention-3 with rows that do not depend on the batch"
            fix = "use exact_attention='auto' or 'triton'"
            raise ConfigError(explain("exact_attention='flash3'", required=required, found=found, fix=fix))
        else:
            words = "jetrl_patch: exact attention by the project's Triton kernel; FlashAttention-3 does not serve: %s"
            logger.info(words, found)
    dispatch.attentions[device.type, head_dim] = chosen
    return chosen


def _problem(heads: tuple[int, int], head_dim: int, device: torch.device, page: int) -> str:
    """Why FlashAttention-3 cannot be used on a device; "" if it can."""
    if dispatch.serving(device.type) != "triton":  # FlashAttention-3 runs with the backward of the Triton kernels
        return "the torch formulas in its place (backend='torch')"
    kernel, missing = flash3.find()
    if kernel is None:
        return missing
    key = (str(device), heads, head_dim, page)
    if key not in _attention_tried:
        with dispatch.attention_by(flash3.FLASH3, device.type, head_dim):
            verdict = compare_attention(heads, head_dim, device, page, large=LARGE)
        torch.cuda.empty_cache()
        _attention_tried[key] = "" if verdict.ok else verdict.found
    return _attention_tried[key]


def choose_ops(hf_config: Any, config: Config, device_type: str) -> None:
    """Choose the exact ops of a trainer's model on this machine. Raises ModelError or ConfigError if it lacks one."""
    dispatch.configure(config.backend, device_type, config.scale_format)
    check_kernels(hf_config, config, device_type)
    text = text_config(hf_config)
    heads = text.num_attention_heads
    shared = key_heads(text)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if has_latent_attention(hf_config):
        shared, width = 1, text.kv_lora_rank + text.qk_rope_head_dim
    choose_attention(config.resolved_attention, (heads, shared), width, torch.device(device_type))
