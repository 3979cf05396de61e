"""The messages around a weight sync: the manifest before the first weight, the commit after the last.

Both are JSON in a uint8 tensor and travel as ordinary ``(name, tensor)`` pairs over the framework's own transfer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from jetrl_patch import errors
from jetrl_patch.config.formats import FORMATS, POW2
from jetrl_patch.config.modes import MODES, RolloutFormat
from jetrl_patch.errors import AuditError, JetrlError, SyncError, explain
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit

if TYPE_CHECKING:
    from jetrl_patch.config import Config

MANIFEST = "jetrl.manifest"
COMMIT = "jetrl.commit"
SCALE_SUFFIX = "_scale_inv"  # DeepSeek FP8 checkpoints: "….weight" and "….weight_scale_inv"
PROTOCOL = 2
MOST_BYTES = 64 << 20  # of a message; a model with 100,000 tensors needs a fifth of it
#: in bytes, enough for every dtype. Some transfers pack without aligning, so a message that ends aligned keeps the next tensor so
ALIGNMENT = 16
_SAME = "install the same version of jetrl_patch in the trainer and in the rollout"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How one side computes. The terms of trainer and rollout must be equal.

    Attributes:
        precision: ``Config.precision``.
        align: ``Config.resolved_align``.
        scale_format: ``Config.scale_format``.
        backend: name of the FP8 GEMM backend; empty unless the trainer computes in FP8.
        granularity: of the weight scales: "block" (128x128) or "channel" (one per output channel).
        experts: how the rollout's ranks split experts, because both sides group sums by it. Empty if experts are not split, and
            outside exact mode, where sums are not grouped.
        attention: the kernel of exact attention; empty for the backend's own.
    """

    precision: str
    align: str
    scale_format: str
    backend: str = ""
    granularity: str = "block"
    experts: str = ""
    attention: str = ""

    @classmethod
    def of(cls, config: Config, backend: str, experts: ExpertSplit = WHOLE, attention: str = "") -> Terms:
        """The terms of one side, from its settings and what it has chosen: backend, split of experts, kernel of attention."""
        return cls(
            precision=config.precision,
            align=config.resolved_align,
            scale_format=config.scale_format,
            backend=backend if config.fp8_train else "",
            granularity=config.granularity,
            experts=str(experts) if config.exact else "",
            attention=attention,
        )

    @property
    def format(self) -> RolloutFormat | None:
        """Format of the quantized linears. None if there are none, or if this version does not know the precision."""
        mode = MODES.get(self.precision)
        return next((found for found in mode.formats if found.granularity == self.granularity), None) if mode else None

    @property
    def weight_dtype(self) -> str:
        """Dtype in which the weights of quantized layers are sent."""
        return "bfloat16" if self.format is None else self.format.sent

    @property
    def quantized(self) -> bool:
        """Whether the trainer sends quantized bytes and scales. If not, it sends BF16, which the rollout quantizes."""
        return self.format is not None and self.format.sent == self.format.dtype

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Shape of the scales sent with a weight ``[N, K]``. ``audit`` refuses a scale format that this version does not know."""
        form = FORMATS.get(self.scale_format, POW2)
        return (shape[0], 1) if self.granularity == "channel" else (-(-shape[0] // form.height), -(-shape[1] // form.block))


_TERMS = tuple(field.name for field in fields(Terms))
#: terms that a manifest omits if they are empty -> what they are, what an empty one means, and what to do if they differ
_OPTIONAL = {
    "experts": (
        "experts, whose sums trainer and rollout group alike", "no split",
        "give the trainer the rollout's tensor and expert parallel sizes",
    ),
    "attention": (
        "exact attention", "the attention of the backend",
        "install the same vLLM on both sides, or set JETRL_EXACT_ATTENTION=triton",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The announcement of one weight sync.

    Attributes:
        terms: how the trainer computes.
        layers: Hugging Face names of the quantized modules.
        tensors: name -> (shape, dtype) of every tensor to be sent, scales excluded.
        guarded: modules that the precision guard moved back to BF16. The rollout does the same.
        base: identity of the sync whose changes are sent; empty if everything is.
    """

    terms: Terms
    layers: tuple[str, ...]
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    guarded: tuple[str, ...] = ()
    base: str = ""

    def encode(self) -> torch.Tensor:
        """Encode as a uint8 tensor ``[n]`` on the CPU."""
        tensors = [[name, list(shape), dtype] for name, (shape, dtype) in self.tensors.items()]
        return encode_json(
            {
                "version": PROTOCOL,
                **{key: value for key, value in asdict(self.terms).items() if value or key not in _OPTIONAL},
                "fp8_layers": list(self.layers),  # the key that other versions of protocol 2 read
                "guarded_layers": list(self.guarded),
                "tensors": tensors,
                "base": self.base,
            }
        )

    @classmethod
    def decode(cls, tensor: torch.Tensor) -> Manifest:
        """Invert ``encode``. Raises SyncError for anything else."""
        data = decode_json(tensor, MANIFEST)
        if data.get("version") != PROTOCOL:
            raise SyncError(explain("weight sync protocol", required=PROTOCOL, found=repr(data.get("version")), fix=_SAME))
        try:
            terms = Terms(**{key: str(data[key]) for key in _TERMS if key in data or key not in _OPTIONAL})
            tensors = {str(n): (_shape(shape), str(t)) for n, shape, t in data["tensors"]}
            layers, guarded = (tuple(map(str, data[key])) for key in ("fp8_layers", "guarded_layers"))
            matrices = {name for name, (shape, _) in tensors.items() if len(shape) == 2}
            missing = set(weights_of([*layers, *guarded])) - matrices
            if missing:
                raise ValueError(f"no matrix is announced as {_some(missing)}")
            if len(tensors) != len(data["tensors"]):
                raise ValueError("a tensor is announced twice")
            base = str(data.get("base", ""))
            return cls(terms=terms, layers=layers, tensors=tensors, guarded=guarded, base=base)
        except (KeyError, TypeError, ValueError) as error:
            raise SyncError(f"the manifest of the weight sync is malformed: {type(error).__name__}: {error}") from error

    def expected(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype) of every tensor that must arrive, scales included."""
        everything = dict(self.tensors)
        if self.terms.quantized:
            for name in weights_of(self.layers):
                everything[name + SCALE_SUFFIX] = (self.terms.scale_shape(self.tensors[name][0]), "float32")
        return everything


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} is not a shape")
    return tuple(sizes)


def weights_of(layers: Iterable[str]) -> list[str]:
    """The names of the weight tensors of these modules."""
    return [layer + ".weight" for layer in layers]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float8_e4m3fn`` -> ``"float8_e4m3fn"``."""
    return str(dtype).removeprefix("torch.")


def encode_json(data: Mapping[str, Any]) -> torch.Tensor:
    """Encode as JSON text in a uint8 tensor ``[n]``, padded with spaces to a multiple of ``ALIGNMENT``."""
    text = json.dumps(data, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode_json(tensor: torch.Tensor, what: str) -> dict[str, Any]:
    """Invert ``encode_json``. Raises SyncError if the bytes are not a JSON object, or more than ``MOST_BYTES``."""
    if tensor.dtype != torch.uint8 or tensor.numel() > MOST_BYTES:
        found, fix = f"{tensor.numel()} values of {dtype_name(tensor.dtype)}", _SAME
        raise SyncError(explain(what, required=f"at most {MOST_BYTES} bytes of JSON", found=found, fix=fix))
    try:
        data = json.loads(tensor.detach().cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise SyncError(f"{what} is not valid JSON ({error}): the transfer may have been cut short. Sync again.") from error
    if not isinstance(data, dict):
        found, fix = type(data).__name__, _SAME
        raise SyncError(explain(what, required="a JSON object", found=found, fix=fix))
    return data


def require_same_terms(trainer: Terms, rollout: Terms, trainer_layers: set[str], rollout_layers: set[str]) -> None:
    """Check that both sides compute the same thing. Raises AuditError with the settings or the layers that differ."""
    for name, (what, empty, fix) in _OPTIONAL.items():
        theirs, ours = (getattr(side, name) or empty for side in (trainer, rollout))
        if theirs != ours:
            required, found = f"{ours}, as in the rollout", f"{theirs} in the trainer"
            raise AuditError(explain(what, required=required, found=found, fix=fix))
    wrong = [
        f"{name} is {getattr(trainer, name)!r} in the trainer and {getattr(rollout, name)!r} in the rollout"
        for name in _TERMS
        if getattr(trainer, name) != getattr(rollout, name)
    ]
    if wrong:
        raise AuditError(
            f"trainer and rollout compute differently: {'; '.join(wrong)}. Start both with the same JETRL_* settings."
        )
    if trainer_layers != rollout_layers:
        only_trainer = _some(trainer_layers - rollout_layers)
        only_rollout = _some(rollout_layers - trainer_layers)
        raise AuditError(
            f"trainer and rollout quantize different layers: only in the trainer: {only_trainer}; "
            f"only in the rollout: {only_rollout}. Use the same model and the same JETRL_EXCLUDE on both sides."
        )


def _some(names: set[str], most: int = 3) -> str:
    """The first names, sorted, and the count of the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more or "none"


# ---- Errors about a rollout engine's process, which the RPC layers may have turned into text -----

def silent(who: str, timeout: float) -> SyncError:
    """The error for a worker that did not answer for ``timeout`` seconds."""
    return SyncError(
        f"{who} has not answered for {timeout:g} s during a weight sync: it is dead, stuck or slow. Check its log, or raise "
        "JETRL_SYNC_TIMEOUT."
    )


#: how a text quotes an error: the name of its class, and its message up to the end of the line
_QUOTED = re.compile(rf"\b({'|'.join(name for name in errors.__all__ if name.endswith('Error'))}): (.*)")


def as_sync_error(error: BaseException) -> JetrlError:
    """The last ``JetrlError`` that the text quotes, else a SyncError: the worker failed or died."""
    if isinstance(error, JetrlError):  # Ray raises an error of the same class again, with the remote traceback as its text
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, JetrlError) else error
    text = str(error)
    if quoted := _QUOTED.findall(text):
        name, message = quoted[-1]
        kind: type[JetrlError] = getattr(errors, name)
        return kind(message.strip("\"')"))
    last = text.strip().splitlines()[-1] if text.strip() else type(error).__name__
    return SyncError(f"the vLLM worker failed or died during a weight sync: {type(error).__name__}: {last}")
