"""The rollout's side of a weight sync: a state machine around the engine's loader, and the check of the engine's memory."""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from jetrl_patch.errors import JetrlError, NotPatchedError, SyncError
from jetrl_patch.sync.delta import Received
from jetrl_patch.sync.digest import Pending, Rect, add, as_2d, read, start
from jetrl_patch.sync.packing import packing_of
from jetrl_patch.sync.protocol import (
    COMMIT,
    MANIFEST,
    SCALE_SUFFIX,
    Manifest,
    Terms,
    decode_json,
    dtype_name,
    require_same_terms,
    weights_of,
)

# ---- Do the pieces in the engine's memory make up the tensor that was sent? ----------------------

def check_tiling(name: str, shape: tuple[int, int], expected: int, rects: Sequence[Rect]) -> None:
    """Check that the rectangles tile ``[rows, cols]`` exactly and that their digests add up to the sender's.

    A slice that is replicated on several ranks counts once.

    Raises:
        SyncError: names the tensor and the fault: missing, differing replicas, a gap, an overlap, or other bytes.
    """
    pieces: dict[tuple[int, int, int, int], int] = {}
    for rect in rects:
        place = (rect.row0, rect.row1, rect.col0, rect.col1)
        if pieces.setdefault(place, rect.digest) != rect.digest:
            raise SyncError(f"{name}: two ranks hold rows {rect.row0}:{rect.row1} with different bytes after the sync")
    if not pieces:
        raise SyncError(f"{name} was sent, but no part of it is in the rollout engine after the sync")
    places = sorted(pieces)
    for i, (r0, r1, c0, c1) in enumerate(places):
        if not (0 <= r0 < r1 <= shape[0] and 0 <= c0 < c1 <= shape[1]):
            raise SyncError(f"{name}: the engine holds [{r0}:{r1}, {c0}:{c1}], outside its shape {shape}")
        for s0, s1, d0, d1 in places[i + 1 :]:
            if r0 < s1 and s0 < r1 and c0 < d1 and d0 < c1:
                raise SyncError(f"{name}: [{r0}:{r1}, {c0}:{c1}] and [{s0}:{s1}, {d0}:{d1}] overlap in the engine")
    covered = sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in places)
    if covered != shape[0] * shape[1]:
        raise SyncError(f"{name}: only {covered} of {shape[0] * shape[1]} elements are in the engine after the sync")
    if add(*pieces.values()) != expected:
        raise SyncError(
            f"{name}: the bytes in the rollout engine are not those that the trainer sent; "
            f"the engine's loader changed or re-quantized them"
        )


# ---- The state machine ---------------------------------------------------------------------------
#     serving ──manifest──▶ receiving (buffers poisoned) ──commit, all checks──▶ serving
#                                └────────────── anything wrong ──────────────▶ failed
#
# After a failure the rest of the stream is read and dropped, so no sender hangs, and ``finish`` raises on every rank. A failed
# engine refuses to generate until a later sync completes: it never serves a mix of two versions.

logger = logging.getLogger(__name__)

#: all-gather of one object per tensor-parallel rank, in rank order
Gather = Callable[[Any], Sequence[Any]]


class Installer(Protocol):
    """What the adapter of a rollout engine implements. All names are Hugging Face names."""

    def quantized_layers(self) -> Sequence[str]:
        """Return the names of the modules that this engine computes quantized."""

    def to_bf16(self, layers: Sequence[str]) -> None:
        """Move these modules to BF16: all of them, or none with an error. Their weights then arrive in BF16."""

    def poison(self) -> None:
        """Fill every buffer that a sync must write with NaN, so an unwritten one shows at once."""

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Copy whole tensors into this rank's part of the model. A weight and its scales may arrive in different calls."""

    def finish(self) -> None:
        """Derive what the engine computes from its weights. Raise SyncError if a parameter was not written."""

    def installed(self, plain: Mapping[str, tuple[tuple[int, ...], str]]) -> Sequence[Rect]:
        """Return digests of the quantized bytes, their scales and the ``to_bf16`` weights in this rank's memory.

        Args:
            plain: shape and dtype of the tensors that were not quantized. Those that are held in this form are digested too.
        """


class State(enum.Enum):
    """State of the engine's weights."""

    SERVING = "serving"
    RECEIVING = "receiving"
    FAILED = "failed"


@dataclass
class _Sync:
    """One sync in progress.

    Attributes:
        expected: shape and dtype of every tensor, by name.
        required: the tensors that must be in memory byte for byte: quantized weights, their scales and guarded weights.
            Empty if BF16 was sent and is quantized here: there are no bytes of the trainer to compare with.
        plain: the rest of ``expected``, except weights quantized here. An engine may hold these in another form.
        unpack: name -> what makes a tensor of this shape from what was sent.
    """

    manifest: Manifest
    expected: dict[str, tuple[tuple[int, ...], str]] = field(init=False)
    required: list[str] = field(init=False, default_factory=list)
    plain: dict[str, tuple[tuple[int, ...], str]] = field(init=False)
    unpack: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = field(init=False, default_factory=dict)
    arrived: dict[str, Pending] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)  # those of ``arrived``, read at the commit
    nbytes: int = 0
    committed: bool = False

    def __post_init__(self) -> None:
        manifest = self.manifest
        self.expected, weights = manifest.expected(), weights_of(manifest.layers)
        if manifest.terms.quantized:
            scales, packing = [name + SCALE_SUFFIX for name in weights], packing_of(manifest.terms.scale_format)
            self.required = [*weights, *scales, *weights_of(manifest.guarded)]
            self.unpack = dict.fromkeys(weights, packing.unpacked_elements) | dict.fromkeys(scales, packing.unpacked_scales)
        others = {*self.required, *weights}
        self.plain = {name: announced for name, announced in self.expected.items() if name not in others}

    def unpacked(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as the engine holds it. Raises SyncError if it is malformed."""
        unpack = self.unpack.get(name)
        return tensor if unpack is None else unpack(tensor, self.expected[name][0])


class Receiver:
    """The receiving end of weight syncs: one per engine process, for the life of the engine.

    Args:
        installer: the engine's loader.
        terms: how this process computes.
        gather: all-gathers objects over the tensor-parallel ranks; the default is for a single rank.
        base: keeps what each sync brought, so the next one can bring only changes.
    """

    def __init__(
        self,
        installer: Installer,
        terms: Terms,
        gather: Gather = lambda mine: [mine],
        base: Received | None = None,
    ) -> None:
        self.installer = installer
        self.terms = terms
        self.gather = gather
        self.base = base
        self.state = State.SERVING
        self.error: JetrlError | None = None
        #: layers that the trainer's precision guard has moved to BF16, here too
        self.guarded: set[str] = set()
        #: the trainer's number of the last complete sync, if its framework counts them; 0 before the first
        self.version = 0
        self._sync: _Sync | None = None
        self._refused: JetrlError | None = None

    def on_bucket(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take one bucket of the stream. Never raises; ``finish`` raises the error."""
        if self.error is not None:
            return
        try:
            self._take(weights)
        except Exception as error:
            self._fail(error)
            _release(error)

    def finish(self) -> dict[str, int]:
        """End the sync: check that everything arrived and is in memory as the trainer sent it.

        Every tensor-parallel rank must call it. Returns ``{"tensors", "bytes", "layers"}``.
        Raises SyncError, AuditError or NotPatchedError, the same on every rank.
        """
        mine: list[Rect] | None = None
        sync = self._sync
        if self.error is None:
            try:
                mine = self._install()
            except Exception as error:
                self._fail(error)
        everybody = self.gather((mine, self.error))
        failure = next((error for _, error in everybody if error is not None), None)
        if failure is None:
            assert sync is not None
            try:
                self._compare([rect for rects, _ in everybody for rect in rects], sync)
            except JetrlError as error:
                failure = error
        if failure is not None:
            self._fail(failure)
            self.error = None  # reported; a later sync may recover the engine
            self._sync = None
            raise failure
        assert sync is not None
        if self.base is not None:
            self.base.seal(sync.digests)
        self.state, self._sync, self._refused = State.SERVING, None, None
        return {"tensors": len(sync.arrived), "bytes": sync.nbytes, "layers": len(sync.manifest.layers)}

    def held(self) -> str:
        """The identity of the base for a delta sync; empty if there is none."""
        return "" if self.base is None else self.base.identity

    def break_off(self, reason: str) -> None:
        """Fail a sync whose transfer broke on this rank: ``finish`` then raises on every rank."""
        if self.error is None:
            self._fail(SyncError(reason))

    def restart(self) -> None:
        """Drop the rest of an unfinished sync, so the next one does not report its error."""
        if self._sync is not None or self.error is not None:
            self.break_off("the trainer gave up the weight sync")
            self.error, self._sync = None, None

    def refuse(self, error: JetrlError) -> None:
        """Serve nothing until the next complete sync, because something else has written the weights, or tried to."""
        if self._sync is not None:
            self._fail(error)
        self.state, self._refused = State.FAILED, error

    def check_serving(self) -> None:
        """Raise SyncError unless the weights in memory come from one complete sync."""
        if self._refused is not None:
            raise SyncError(f"this engine does not generate. {self._refused}")
        if self.state is not State.SERVING:
            state = self.state.value
            raise SyncError(
                f"this engine does not generate: its weights are in state {state!r} after an incomplete weight sync. "
                f"Sync again or restart the run."
            )

    def _take(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        batch: list[tuple[str, torch.Tensor]] = []
        for name, tensor in weights:
            if name == MANIFEST:
                self._open(Manifest.decode(tensor))
            elif self._sync is None:
                raise NotPatchedError(
                    f"{name} arrived before {MANIFEST}, so the trainer that sends it is not patched; "
                    f"set the same JETRL_* variables in every process and let the framework load its plugins"
                )
            elif self._sync.committed:
                raise SyncError(f"{name} arrived after the end of the weight sync")
            elif name == COMMIT:
                if batch:
                    self.installer.load(batch)
                    batch = []
                self._commit(decode_json(tensor, COMMIT))
            else:
                self._sync.nbytes += tensor.nbytes
                if self.base is None:
                    tensor = self._sync.unpacked(name, tensor)
                else:
                    name, tensor = self.base.whole(name, tensor)
                self._check_arrival(self._sync, name, tensor)
                batch.append((name, tensor))
        if batch:
            self.installer.load(batch)

    def _open(self, manifest: Manifest) -> None:
        if self._sync is not None:
            raise SyncError("a second manifest arrived in the middle of a weight sync")
        guarded, here = set(manifest.guarded), set(self.installer.quantized_layers())
        require_same_terms(manifest.terms, self.terms, set(manifest.layers) | guarded, here | self.guarded)
        require_same_terms(manifest.terms, self.terms, set(manifest.layers), here - guarded)
        if self.base is not None:
            self.base.begin(manifest.base)
        self._sync = _Sync(manifest)
        self.state = State.RECEIVING
        if guarded & here:
            self.installer.to_bf16(sorted(guarded & here))
            self.guarded |= guarded
        self.installer.poison()

    def _check_arrival(self, sync: _Sync, name: str, tensor: torch.Tensor) -> None:
        expected = sync.expected.get(name)
        found = (tuple(tensor.shape), dtype_name(tensor.dtype))
        if expected is None:
            raise SyncError(f"{name} arrived, but the trainer had not announced it")
        if expected != found:
            raise SyncError(f"{name}: the trainer announced shape and dtype {expected}, but {found} arrived")
        if name in sync.arrived:
            raise SyncError(f"{name} arrived twice in one weight sync")
        sync.arrived[name] = start(tensor)

    def _commit(self, data: dict[str, Any]) -> None:
        assert self._sync is not None
        sent, arrived = data.get("digests", {}), self._sync.arrived
        missing = [name for name in self._sync.expected if name not in arrived]
        if missing:
            raise SyncError(f"weights missing from the sync: {', '.join(missing[:3])} ({len(missing)} in total)")
        found = (value for value, _ in read(list(arrived.values())))
        digests = self._sync.digests = dict(zip(arrived, found, strict=True))
        wrong = [name for name, value in digests.items() if sent.get(name) != value]
        if wrong:
            raise SyncError(f"weights changed on the way: {', '.join(wrong[:3])} ({len(wrong)} in total)")
        self._sync.committed = True

    def _install(self) -> list[Rect]:
        if self._sync is None or not self._sync.committed:
            raise SyncError("the weight sync ended before the commit of the trainer. See the trainer's log for the cause.")
        self.installer.finish()
        return list(self.installer.installed(self._sync.plain))

    def _compare(self, rects: list[Rect], sync: _Sync) -> None:
        """Compare the memory of all ranks with what the trainer sent. Raises SyncError."""
        held: dict[str, list[Rect]] = {}
        for rect in rects:
            held.setdefault(rect.name, []).append(rect)
        for tensor in (*sync.required, *(name for name in sync.plain if name in held)):
            rows, columns = as_2d(torch.empty(sync.expected[tensor][0], device="meta")).shape
            check_tiling(tensor, (rows, columns), sync.digests[tensor], held.get(tensor, ()))

    def _fail(self, error: Exception) -> None:
        """Keep the error, and poison half-loaded weights: they must not be served."""
        touched = self.state is State.RECEIVING
        self.state = State.FAILED
        if isinstance(error, JetrlError):
            self.error = error
        else:
            logger.error("jetrl_patch: %s", "".join(traceback.format_exception(error)))
            self.error = SyncError(f"the engine could not load the weights: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        if touched:
            try:
                self.installer.poison()
            except Exception:  # the engine serves nothing anyway, and the other ranks wait for this one in ``finish``
                logger.exception("jetrl_patch: the weights of a failed sync could not be poisoned")


def _release(error: BaseException | None) -> None:
    """Drop the frames of a kept error: they hold views of the transfer's buffer, which could then not be closed."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
