"""Everything that can go wrong, by name.

Every message says three things: what was asked for, what was found, and what to do about it.
``JetrlError`` is the common root, so ``except jetrl_patch.JetrlError`` catches all of them and nothing else.
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "ConfigError",
    "ConflictError",
    "JetrlError",
    "ModelError",
    "NotPatchedError",
    "PatchError",
    "PrecisionError",
    "SyncError",
    "VersionError",
    "explain",
]


class JetrlError(RuntimeError):
    """The root of all errors of this project."""


class ConfigError(JetrlError, ValueError):
    """A setting is unknown, malformed, or contradicts another one."""


class VersionError(JetrlError):
    """A framework is missing, or its version is outside the supported range."""


class ModelError(JetrlError):
    """The model cannot be run as asked: its family, its layers or its widths."""


class PatchError(JetrlError):
    """A target is missing or a patch failed; everything done before it was undone."""


class ConflictError(JetrlError):
    """Somebody else holds what is to be changed: another config, or another patch on the same attribute."""


class PrecisionError(JetrlError):
    """A layer's figures are beyond a threshold, and the run was asked to stop then."""


class SyncError(JetrlError):
    """A weight sync did not arrive whole; the rollout serves no mix of two versions."""


class AuditError(JetrlError):
    """Trainer and rollout disagree about which layers are FP8, or how."""


class NotPatchedError(JetrlError):
    """A process that should be patched is not."""


def explain(what: str, *, asked: object, found: object, fix: str) -> str:
    """One wording for all messages: ``what: asked for ..., but found ...; fix``."""
    return f"{what}: asked for {asked}, but found {found}; {fix}"
