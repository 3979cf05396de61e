"""The metadata of one setting, which is a field of ``Config``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jetrl_patch.config.text import NUMBER, SWITCH, WORD, Form

__all__ = ["GROUPS", "PREFIX", "Setting", "setting", "settings_of"]

PREFIX = "JETRL_"

#: group of settings -> its subject, in the order of the documentation
GROUPS = {
    "precision": "Number formats shared by trainer and rollout.",
    "exactness": "How closely the two sides agree, and which backend computes their products.",
    "rollout": "Number formats of the rollout only.",
    "sync": "How weights move between processes.",
    "monitor": "Measurements of the quantized layers, and the actions they trigger.",
    "correction": "Importance weights against the remaining mismatch between trainer and rollout.",
    "optimizer": "The format of the optimizer state, and which checkpoints can be resumed.",
    "process": "The device the run uses, and whether bugs of the frameworks are fixed.",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of ``Config``.

    Attributes:
        name: of the field; the variable, verl's key and the command-line option derive from it.
        default: its default value.
        group: a key of ``GROUPS``.
        doc: its description, in Markdown.
        form: its text form.
        choices: the allowed words; empty if the setting is not an enumeration.
        option: placeholder of its command-line option, ``"NAME"``; ``""`` for a switch; None if only ``--set`` sets it.
        help: the option's line in the usage text.
        note: addition to the description of its variable.
        joint: whether it depends on another setting, so that the two are checked together.
    """

    name: str
    default: Any
    group: str
    doc: str
    form: Form
    choices: tuple[str, ...]
    option: str | None
    help: str
    note: str
    joint: bool

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Name of the command-line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def values(self) -> str:
        """The allowed values, in Markdown."""
        return ", ".join(f"`{choice}`" for choice in self.choices) or self.form.values


def setting(
    default: Any,
    group: str,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    form: Form | None = None,
    option: str | None = None,
    help: str = "",
    note: str = "",
    joint: bool = False,
) -> Any:
    """A dataclass field with its metadata. Without ``form``, the choices or the default decide it."""
    if form is None:
        form = WORD if choices else SWITCH if isinstance(default, bool) else NUMBER
    found = {
        "default": default, "group": group, "doc": doc, "form": form, "choices": choices, "option": option, "help": help,
        "note": note or form.note, "joint": joint,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=found)


def settings_of(kind: type) -> dict[str, Setting]:
    """Name -> setting, for the fields of a dataclass in their order."""
    return {field.name: Setting(name=field.name, **field.metadata) for field in dataclasses.fields(kind)}
