"""Recover an error of a rollout engine process, which the RPC layers have turned into text."""

from __future__ import annotations

from jetrl_patch import errors
from jetrl_patch.errors import JetrlError, SyncError

__all__ = ["as_sync_error"]

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
