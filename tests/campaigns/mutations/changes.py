"""The changes: of what, in which file, what replaces what, and the tests nearest to it."""

# ruff: noqa: E501  # a line of code and what replaces it stand side by side
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["GROUPS", "Change", "Group", "changes"]


@dataclass(frozen=True)
class Change:
    """One text, which occurs once in ``file``, replaced by another. ``tests`` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Changes to one file."""

    file: str
    tests: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]


def changes() -> Iterator[Change]:
    """All changes, named by their file and number."""
    for group in GROUPS:
        for number, (old, new) in enumerate(group.changes, 1):
            yield Change(f"{group.file.rpartition('/')[2]} {number}", group.file, old, new, group.tests)


_CORE = "jetrl_patch"
_NARROW = ("tests/verl/test_megatron_engine.py::test_log_probs_gradients_and_what_is_sent[heads narrower than a block]",)
_LATENT = ("tests/verl/test_megatron_engine.py::test_log_probs_gradients_and_what_is_sent[latent attention, resumed]",)
GROUPS = (
    Group(
        f"{_CORE}/sync/digest.py", ("tests/sync/test_digest.py", "tests/sync/test_digest_kernels.py"),
        (
            ("chunk = bytes_RC[first : first + step].to(torch.int64) + 1", "chunk = bytes_RC[first : first + step].to(torch.int64)"),
            ("torch.arange(row0, row0 + rows,", "torch.arange(0, rows,"),
            ("torch.arange(col0 * size, col0 * size + cols,", "torch.arange(col0, col0 + cols,"),
            ("special += (~torch.isfinite(matrix)).any()", "special += torch.isnan(matrix).any()"),
            ("return (z ^ _shift(z, 31)) | 1", "return z ^ _shift(z, 31)"),
            ("return (z >> bits) & ((1 << (64 - bits)) - 1)", "return z >> bits"),
        ),
    ),
    Group(
        f"{_CORE}/sync/receive.py", ("tests/sync/test_receive.py", "tests/sync/test_tiling.py", "tests/sync/test_receive_machine.py"),
        (
            ("if pieces.setdefault(place, rect.digest) != rect.digest:", "if pieces.setdefault(place, rect.digest) is None:"),
            ("if r0 < s1 and s0 < r1 and c0 < d1 and d0 < c1:", "if r0 < s1 and s0 < r1 and c0 < d1 and d0 < c0:"),
            ("if covered != shape[0] * shape[1]:", "if covered > shape[0] * shape[1]:"),
            ("if add(*pieces.values()) != expected:", "if not add(*pieces.values()):"),
            ("            self.guarded |= guarded\n        self.installer.poison()", "            self.guarded |= guarded"),
            ("        if touched:\n            try:", "        if False:\n            try:"),
            ("if name in sync.arrived:", "if name in sync.digests:"),
            ("wrong = [name for name, value in digests.items() if sent.get(name) != value]", "wrong = [name for name in digests if name not in sent]"),
            ("missing = [name for name in self._sync.expected if name not in arrived]", "missing = [name for name in self._sync.manifest.tensors if name not in arrived]"),
            ("            elif self._sync.committed:", "            elif False:"),
            ("self.state, self._sync, self._refused = State.SERVING, None, None", "self.state, self._sync = State.SERVING, None"),
            ("        if self.state is not State.SERVING:", "        if self.state is State.FAILED:"),
            ("self.required = [*weights, *scales, *weights_of(manifest.guarded)]", "self.required = [*weights, *scales]"),
            ("everybody = self.gather((mine, self.error))", "everybody = [(mine, self.error)]"),
        ),
    ),
    Group(
        f"{_CORE}/sync/send.py", ("tests/sync/test_stream.py",),
        (
            ("            if special:  #", "            if False:  #"),
            ("    if name in sent:\n        raise SyncError", "    if False:\n        raise SyncError"),
            ("    missing = sorted(set(announced) - outgoing.names)", "    missing = sorted(ours - outgoing.names)"),
            ("    if tuple(weight.shape) != announced[name][0]:", "    if weight.dim() != len(announced[name][0]):"),
        ),
    ),
    Group(
        f"{_CORE}/sync/protocol.py", ("tests/sync/test_messages.py", "tests/sync/test_receive.py"),
        (
            ("    if trainer_layers != rollout_layers:", "    if not trainer_layers <= rollout_layers:"),
            ("        if theirs != ours:", "        if theirs not in (ours, empty):"),
            ('if data.get("version") != PROTOCOL:', 'if "version" not in data:'),
            ("            if len(tensors) != len(data[\"tensors\"]):", "            if not tensors:"),
        ),
    ),
    Group(
        f"{_CORE}/sync/delta.py", ("tests/sync/test_delta.py", "tests/sync/test_base.py"),
        (
            ("_require(changes == 0 or int(at[-1]) < len(target),", "_require(changes == 0 or int(at[0]) < len(target),"),
            ("at = symbols.cumsum(0)[symbols != _FILLER[width]]", "at = symbols.cumsum(0)"),
            ("self._against = self.identity if self.identity == self._held else \"\"", "self._against = self.identity"),
            ("        self.identity = self._held = \"\"\n", "        self._held = \"\"\n"),
            ("_require(place == len(record),", "_require(place <= len(record),"),
        ),
    ),
    Group(
        f"{_CORE}/sync/packing.py", ("tests/sync/test_packing.py",),
        (
            ("return codes[:, ::2] | codes[:, 1::2] << 4", "return codes[:, 1::2] | codes[:, ::2] << 4"),
            ("return torch.where(sent == 255, torch.nan, scale)", "return scale"),
            ("    if sent.dtype != torch.uint8 or tuple(sent.shape) != shape:", "    if sent.dtype != torch.uint8:"),
        ),
    ),
    Group(
        f"{_CORE}/backends/quantize.py", ("tests/fp8/test_quantize.py", "tests/fp8/test_gemm.py", "tests/fp8/test_backends.py"),
        (
            ("rounded = ((bits + 0x7FFFFF) & 0x7F800000)", "rounded = ((bits + 0x400000) & 0x7F800000)"),
            ("return torch.where(torch.isfinite(scale), rounded, scale)", "return rounded"),
            ("return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)", "return (scaled * 0.999).clamp(-FP8_MAX, FP8_MAX).to(FP8)"),
            ("amax.float().clamp(min=AMAX_FLOOR)", "amax.float()"),
            ("return torch.where(low == high, low, torch.nan)", "return low"),
            ("w = w_NK.to(torch.bfloat16).float()", "w = w_NK.float()"),
            ("acc = (acc + dot * scale).float().double()", "acc = acc + dot * scale"),
            ("return functools.reduce(torch.add, partials).to(out_dtype)", "return functools.reduce(torch.add, partials[::-1]).to(out_dtype)"),
        ),
    ),
    Group(
        f"{_CORE}/native/kernels.c", ("tests/fp8/test_quantize.py",),
        (
            ("s = as_float((b + 0x7fffffu) & 0x7f800000u);", "s = as_float(b & 0x7f800000u);"),
            ("? 1e-10f : amax", "? 1e-12f : amax"),
        ),
    ),
    Group(
        f"{_CORE}/fp8/linear.py", ("tests/fp8/test_linear.py", "tests/fp8/test_operands.py", "tests/fp8/test_unchanged.py"),
        (
            ("return x._version, *state.format", "return state.format"),
            ("return both if made == [grad._version, state.format] else None", "return both"),
            ("if key is not None and self._cached is not None and self._cached[0] == key:", "if key is not None and self._cached is not None:"),
            ("key, kept = (since, weight._version, weight.shape,", "key, kept = (since, weight.shape,"),
            ("db = dy_MN.sum(0, dtype=torch.float32) if wants_b", "db = dy_MN.sum(0) if wants_b"),
            ("return bytes_differ | (a.s.view(torch.int32) != b.s.view(torch.int32)).any()", "return bytes_differ"),
        ),
    ),
    Group(
        f"{_CORE}/exact/logprob.py", ("tests/exact/test_logprob.py", "tests/exact/test_chunked.py", "tests/exact/test_ops.py"),
        (
            ("    if isinstance(temperature, Tensor) or temperature != 1.0:\n        x = x / temperature", "    if isinstance(temperature, Tensor) or temperature != 1.0:\n        x = x * (1 / temperature)"),
            ("    x = logits.float()\n    return x if edit is None", "    x = logits\n    return x if edit is None"),
            ("            gradient = dy[part]\n", "            gradient = dy[: part.stop - part.start]\n"),
            ("temperature[part] if by_row else temperature", "temperature[: part.stop - part.start] if by_row else temperature"),
            ("        g = g - term", "        g = g"),
            ("functools.reduce(torch.add, (_product(*pair, torch.float32) for pair in pairs))", "functools.reduce(torch.add, (_product(*pair, torch.bfloat16) for pair in pairs))"),
            ("dw = found.pop(0) if dw is None else dw.float().add_(found.pop(0))", "dw = found.pop(0) if dw is None else dw.add_(found.pop(0))"),
        ),
    ),
    Group(
        f"{_CORE}/exact/support.py", ("tests/exact/test_support.py",),
        (
            ("& (hit != (~self._bans).long())", "& (hit > 1)"),
            ("inside = (rows >= first) & (rows < first + height)", "inside = rows < first + height"),
            ("& (counts > 0).unsqueeze(1)", "& (counts >= 0).unsqueeze(1)"),
        ),
    ),
    Group(
        f"{_CORE}/exact/elementwise.py", ("tests/exact/test_ops.py",),
        (
            ("else w_K * y.to(torch.bfloat16)", "else (w_K * y).to(torch.bfloat16)"),
            ("y = (exact * torch.sigmoid(exact)).to(torch.bfloat16) * u", "y = (exact * torch.sigmoid(exact) * u).to(torch.bfloat16)"),
            ("dx = (gw - hat * (gw * hat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)", "dx = gw * rstd.unsqueeze(-1)"),
        ),
    ),
    Group(
        f"{_CORE}/patching/journal.py", ("tests/patching/test_journal.py", "tests/patching/test_journal_machine.py"),
        (
            ("delattr(owner, name) if value is NOTSET else setattr(owner, name, value)", "setattr(owner, name, value)"),
            ("return namespace.get(name, NOTSET)", "return getattr(owner, name, NOTSET)"),
            ("entry = self._entries.pop()", "entry = self._entries.pop(0)"),
            ("            if disputed and not force:", "            if disputed and force:"),
            ("    if _same(slot.read(), entry.after):\n        slot.write(entry.before)", "    if True:\n        slot.write(entry.before)"),
            ("            if not _same(slot.read(), value):", "            if False:"),
        ),
    ),
    Group(
        f"{_CORE}/trainer/audit.py", ("tests/trainer/test_audit.py",),
        (
            ("if found.equal == found.tokens or not config.exact:", "if found.equal or not config.exact:"),
            ("    if config.on_mismatch == \"stop\":", "    if config.on_mismatch != \"stop\":"),
            ("self.failed |= any(part[\"differed\"] for part in parts)", "self.failed = any(part[\"differed\"] for part in parts)"),
            ("mask.bool() & current.unsqueeze(1).to(mask.device), config, names)", "mask.bool(), config, names)"),
            ("return [i * count // wanted for i in range(wanted)]", "return list(range(wanted))"),
        ),
    ),
    Group(
        f"{_CORE}/measure/corrections.py", ("tests/correction/test_weights.py", "tests/correction/test_objectives.py"),
        (
            ("return log_ratio.detach().double()", "return log_ratio.double()"),
            ("kept = counted if correction.truncates else counted & ~outside", "kept = counted & ~outside"),
            ("    rho = ratio.detach()", "    rho = ratio"),
            ("torch.minimum(ratio.clamp(min=1 - clip_low), high)", "torch.minimum(ratio.clamp(min=1 + clip_low), high)"),
            (".clamp(-_SAFE, _SAFE).exp()", ".exp()"),
        ),
    ),
    Group(
        f"{_CORE}/trainer/optimizer.py", ("tests/optim/test_adamw.py",),
        (
            ("exp_avg_sq.copy_(v.sqrt() if quantized else v)", "exp_avg_sq.copy_(v)"),
            ("update = update.clamp(-most, most)", "pass"),
            ("new = before - lr * weight_decay * before - lr * update", "new = before - lr * update"),
        ),
    ),
    Group(
        f"{_CORE}/fp8/parallel.py", ("tests/fp8/test_split.py",),
        (
            ("[backend.gemm(a, b, torch.float32) for a, b", "[backend.gemm(a, b, torch.bfloat16).float() for a, b"),
            ("added(parts_RPmN.view(ranks * P, rows, N))", "added(parts_RPmN.view(ranks * P, rows, N).flip(0))"),
            ("rows = -(-M // ranks)", "rows = M // ranks"),
            ("        if not self.scattered:\n            return grad", "        if True:\n            return grad"),
        ),
    ),
    Group(
        f"{_CORE}/trainer/support.py", ("tests/trainer/test_turns.py",),
        (
            ("for place, drawn in enumerate(mask) if drawn]", "for place, drawn in enumerate(mask)]"),
            ("or found != list(tokens[: len(found)]) or", "or"),
            ("or here[-1] - here[0] != len(here) - 1:", ":"),
            ("pieces.append((here[0], drawn.part(0, len(here))))", "pieces.append((here[0], drawn))"),
        ),
    ),
    Group(
        "adapters/verl/support.py", ("tests/verl/test_support.py",),
        (
            ("first = rows * get_ulysses_sequence_parallel_rank()", "first = 0"),
            ("set(own) == {shared}", "shared in own"),
            ("            raise AuditError(one)\n", "            continue\n"),
        ),
    ),
    Group(
        f"{_CORE}/exact/vocabulary.py", ("tests/fp8/test_split.py",),
        (
            ("return every[:, :vocabulary]", "return every"),
            ("grad_outputs[0].chunk(ctx.ranks, 1)[ctx.rank], None", "grad_outputs[0].chunk(ctx.ranks, 1)[0], None"),
        ),
    ),
    Group(
        "adapters/megatron/exchange.py", ("tests/fp8/test_split.py",),
        (
            ("torch.where(second, 2 * ranks - 1 - number, number)", "torch.where(second, number - ranks, number)"),
            ("+ second * chunk", ""),
            ("return received.flatten(0, 1)[self._place]", "return received.flatten(0, 1)"),
            ("x.chunk(self._ranks)[self.rank]", "x.chunk(self._ranks)[0]"),
        ),
    ),
    Group(
        "adapters/megatron/spec.py", _NARROW, (("column if whole_blocks else bound(layers.HeadsColumn, run)", "column"),),
    ),
    Group(
        "adapters/megatron/latent.py", _LATENT,
        (
            ("rotated_pairs(keys[..., L:], cos, sin)", "keys[..., L:]"),
            ("self.run.latent_scale, False", "self.key**-0.5, False"),
            ("torch.cat((up.norm(latent), rotary), -1)", "torch.cat((latent, rotary), -1)"),
        ),
    ),
    Group(
        "adapters/megatron/mixture.py", _LATENT,
        (
            ("self.expert_bias = self.expert_bias.float()", "self.expert_bias = self.expert_bias"),
            ("found + self.shared_experts(hidden_states)[0]", "found"),
        ),
    ),
    Group(
        "adapters/trl/correction.py", ("tests/trl/test_settings.py::test_acr_in_trls_own_loss",),
        (("1 - lower, upper - 1", "1 - lower, upper"), ("full_like(upper, 1 - given[0])", "full_like(upper, given[0])")),
    ),
    Group(
        f"{_CORE}/fp8/expert_ranks.py", ("tests/fp8/test_expert_ranks.py",),
        (
            ("ranks.exchange(rows_PSH[by_home]", "ranks.exchange(rows_PSH"),
            ("(ids_Tk.reshape(-1) // ranks.each)", "(ids_Tk.reshape(-1) % ranks.size)"),
            ("zip(every.split(most), counts, strict=True)", "zip(every.split(most), counts[::-1], strict=True)"),
        ),
    ),
)  # fmt: skip
