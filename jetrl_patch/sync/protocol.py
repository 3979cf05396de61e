"""The messages around a weight sync: the manifest before the first weight, the commit after the last.

Both are JSON in a uint8 tensor and travel as ordinary ``(name, tensor)`` pairs over the framework's own transfer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from jetrl_patch import errors
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
#: bytes, enough for every dtype; transfers that do not align what they pack read the tensors behind it at their own offsets
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
        experts: how the rollout's ranks split experts, by which both sides group sums; empty if the ranks do not, or outside of
            exact mode, where no sum is grouped.
        attention: what computes exact attention; empty if the backend's own kernel does.
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
        """Return the terms of one side: ``backend`` and ``attention`` are those it has chosen, ``experts`` how it splits them.

        The backend is omitted if the trainer runs no FP8 GEMM, and the split outside of exact mode: the two sides then have
        nothing of the kind to agree on.
        """
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
        return None if mode is None else mode.format(self.granularity)

    @property
    def quantized(self) -> bool:
        """Whether the trainer sends quantized bytes and scales. If not, it sends BF16, which the rollout quantizes."""
        return self.format is not None and self.format.is_sent

    @property
    def weight_dtype(self) -> str:
        """Dtype in which the weights of quantized layers are sent."""
        return "bfloat16" if self.format is None else self.format.sent


_TERMS = tuple(field.name for field in fields(Terms))
#: terms that a manifest holds only if they are not empty -> what they are, what an empty one means, and what to do if they differ
_OPTIONAL = {
    "experts": (
        "experts, whose sums trainer and rollout group alike", "no split",
        "give the trainer the rollout's own tensor and expert parallel sizes",
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
                "fp8_layers": list(self.layers),  # the key of protocol 2, which other versions read
                "guarded_layers": list(self.guarded),
                "tensors": tensors,
                **({"base": self.base} if self.base else {}),
            }
        )

    @classmethod
    def decode(cls, tensor: torch.Tensor) -> Manifest:
        """Invert ``encode``. Raises SyncError for anything else."""
        data = decode_json(tensor, MANIFEST)
        if data.get("version") != PROTOCOL:
            raise SyncError(
                explain(
                    "weight sync protocol",
                    required=PROTOCOL,
                    found=repr(data.get("version")),
                    fix=_SAME,
                )
            )
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
        """Return name -> (shape, dtype) of every tensor that must arrive, scales included."""
        everything = dict(self.tensors)
        form = self.terms.format
        if form is not None and form.is_sent:
            for name in weights_of(self.layers):
                shape = self.tensors[name][0]
                everything[name + SCALE_SUFFIX] = (form.scale_shape(shape), "float32")
        return everything


def _shape(sizes: Any) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} is not a shape")
    return tuple(sizes)


def weights_of(layers: tuple[str, ...] | list[str]) -> list[str]:
    """Return the names of the weight tensors of these modules."""
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
        raise SyncError(
            f"{what} is not valid JSON ({error}): the transfer may have been cut short. Sync again."
        ) from error
    if not isinstance(data, dict):
        found, fix = type(data).__name__, _SAME
        raise SyncError(explain(what, required="a JSON object", found=found, fix=fix))
    return data


def audit(trainer: Terms, rollout: Terms, trainer_layers: set[str], rollout_layers: set[str]) -> None:
    """Check that both sides compute the same thing.

    Raises AuditError, which names the settings or the layers that differ.
    """
    for name, (what, empty, fix) in _OPTIONAL.items():
        theirs, ours = (getattr(side, name) or empty for side in (trainer, rollout))
        if theirs != ours:
            required, found = f"{ours}, as in the rollout", f"{theirs} in the trainer"
            raise AuditError(explain(what, required=required, found=found, fix=fix))
    wrong = [
        f"{name} is {theirs!r} in the trainer and {ours!r} in the rollout"
        for name, theirs, ours in ((field, getattr(trainer, field), getattr(rollout, field)) for field in _TERMS)
        if theirs != ours
    ]
    if wrong:
        raise AuditError(
            f"trainer and rollout do not compute alike: {'; '.join(wrong)}. Start both with the same JETRL_* settings."
        )
    if trainer_layers != rollout_layers:
        only_trainer = _some(trainer_layers - rollout_layers)
        only_rollout = _some(rollout_layers - trainer_layers)
        raise AuditError(
            f"trainer and rollout quantize different layers: only in the trainer: {only_trainer}; "
            f"only in the rollout: {only_rollout}. Use the same model and the same JETRL_EXCLUDE on both sides."
        )


def _some(names: set[str], most: int = 3) -> str:
    """Return the first names, sorted, and the count of the rest."""
    if not names:
        return "none"
    shown = sorted(names)[:most]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


# ---- Errors about a rollout engine's process, which the RPC layers may have turned into text -----

def silent(who: str, timeout: float) -> SyncError:
    """The error for a worker that did not answer for ``timeout`` seconds."""
    return SyncError(
        f"{who} has not answered for {timeout:g} s during a weight sync: it is dead, stuck or slow. Check its log, or raise "
        "JETRL_SYNC_TIMEOUT."
    )


_KINDS = ("AuditError", "NotPatchedError", "ConflictError", "ConfigError", "ModelError", "SyncError")


def as_sync_error(error: BaseException) -> JetrlError:
    """Return the ``JetrlError`` that the text quotes, else a SyncError: the worker failed or died."""
    if isinstance(error, JetrlError):  # one that Ray has raised again is of its class, with a remote traceback as its text
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, JetrlError) else error
    text = str(error)
    for name in _KINDS:
        marker = f"{name}: "
        if marker in text:
            message = text.rsplit(marker, 1)[1].splitlines()[0].strip("\"')")
            kind: type[JetrlError] = getattr(errors, name)
            return kind(message)
    last = text.strip().splitlines()[-1] if text.strip() else type(error).__name__
    return SyncError(f"the vLLM worker failed or died during a weight sync: {type(error).__name__}: {last}")
