"""What is known about one setting, in one place: the metadata of a field of ``Config``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jetrl_patch.config.text import NUMBER, SWITCH, WORD, Form

__all__ = ["GROUPS", "PREFIX", "Setting", "setting", "settings_of"]

PREFIX = "JETRL_"

#: the groups of settings and what each is about, in the order of the documentation
GROUPS = {
    "precision": "What trains and what samples in which format, on both sides alike.",
    "exactness": "How far the two sides agree, and which products compute it.",
    "rollout": "Formats of the rollout alone.",
    "sync": "How weights travel.",
    "monitor": "What is measured of the quantized layers, and what follows from it.",
    "correction": "Importance weights against what is left of the mismatch between trainer and rollout.",
    "optimizer": "How the optimizer keeps its states, and which checkpoints it goes on from.",
    "process": "Where the run takes place.",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of ``Config``.

    Attributes:
        name: of the field; the variable, verl's key and the option follow from it.
        default: where it is not given.
        group: a key of ``GROUPS``.
        doc: what it does, in Markdown.
        form: how it is written as text.
        choices: the words it can be; empty where it is no word of a few.
        option: the placeholder of its option on the command line, ``"NAME"``; an option of a switch has none, ``""``;
            None where only ``--set`` reaches it.
        help: what the usage text says beside that option.
        note: what its variable's meaning adds.
        joint: whether it means something only beside another one, so that it is judged together with it.
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
        """Of the environment."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """On the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def values(self) -> str:
        """What can be given, in Markdown."""
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
    """A dataclass field with its metadata; the form follows from choices or the default where it is not given."""
    if form is None:
        form = WORD if choices else SWITCH if isinstance(default, bool) else NUMBER
    found = {
        "default": default, "group": group, "doc": doc, "form": form, "choices": choices, "option": option, "help": help,
        "note": note or form.note, "joint": joint,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=found)


def settings_of(kind: type) -> dict[str, Setting]:
    """Name -> setting, for every field of a dataclass, in their order."""
    return {field.name: Setting(name=field.name, **field.metadata) for field in dataclasses.fields(kind)}
