"""Everything that can go wrong, by name.

Every message says three things: what is required, what was found, and what to do about it.
``JetrlError`` is the common root, so ``except jetrl_patch.JetrlError`` catches all of them and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    "differences",
    "explain",
    "split_fix",
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


def explain(what: str, *, required: object, found: object, fix: str) -> str:
    """The one wording of a message: ``what: required ..., found .... Fix.``

    Args:
        what: the setting, layer, process or file that the message is about; it starts the sentence.
        required: what the project needs there, as a noun phrase or a value.
        found: what is there instead, in the same form.
        fix: what to do, as a sentence that starts with a verb; its capital letter and full stop are added.
    """
    return f"{what}: required {required}, found {found}. {fix[0].upper()}{fix[1:]}{'' if fix.endswith('.') else '.'}"


def differences(
    what: str, *, required: Mapping[str, object], found: Mapping[str, object], fix: str, origin: str = ""
) -> str:
    """``explain`` for two sets of settings: it names those that differ, and no others.

    ``origin`` says where those that were found come from.

    >>> differences("settings of a worker", required={"a": 1, "b": 2}, found={"a": 1, "b": 3}, fix="use b=2")
    'settings of a worker: required b=2, found b=3. Use b=2.'
    """
    names = [name for name in {**required, **found} if not _same(name, required, found)]

    def words(settings: Mapping[str, object]) -> str:
        return ", ".join(f"{name}={settings[name]!r}" if name in settings else f"no {name}" for name in names)

    return explain(what, required=words(required), found=words(found) + origin, fix=fix)


def _same(name: str, required: Mapping[str, object], found: Mapping[str, object]) -> bool:
    return name in required and name in found and required[name] == found[name]


def split_fix(message: str) -> tuple[str, str]:
    """Back from a message to ``(finding, fix)``; the fix is empty where the message names none.

    A message of ``explain`` ends in a sentence; others put the fix behind their last semicolon.
    """
    finding, mark, fix = message.rpartition(". " if message.endswith(".") else "; ")
    return (finding, fix.removesuffix(".")) if mark else (message, "")
