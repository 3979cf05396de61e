"""Every write to foreign code goes through here, and comes back out in the opposite order.

What is stored is the raw ``__dict__`` entry (the ``staticmethod`` object, not the function it yields), or NOTSET
when the owner had none and only inherited the name: undoing then *deletes*, so that inheritance works again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from jetrl_patch.errors import ConflictError, PatchError

__all__ = ["NOTSET", "Journal", "Record", "raw_entry"]


class _NotSet:
    def __repr__(self) -> str:
        return "NOTSET"


NOTSET: Final = _NotSet()


@dataclass(frozen=True)
class Record:
    """One change: what it touched, why it is here, and when it may go."""

    target: str
    reason: str = ""
    remove_when: str = ""


@dataclass
class _Slot:
    """A place that can be read, written and emptied: an attribute or an item."""

    owner: Any
    key: Any
    read: Callable[[], object]
    write: Callable[[object], None]
    erase: Callable[[], None]

    def is_same_place(self, other: _Slot) -> bool:
        return self.owner is other.owner and type(self.key) is type(other.key) and bool(self.key == other.key)


def _item(mapping: MutableMapping[Any, Any], key: Any) -> _Slot:
    return _Slot(
        mapping,
        key,
        read=lambda: mapping.get(key, NOTSET),
        write=lambda v: mapping.__setitem__(key, v),
        erase=lambda: mapping.__delitem__(key),
    )


@dataclass
class _Entry:
    record: Record
    slot: _Slot | None = None
    before: object = NOTSET
    ours: object = NOTSET
    undo: Callable[[], None] | None = None


def raw_entry(owner: object, name: str) -> object:
    """What stands in the owner's own ``__dict__`` under this name, or NOTSET; descriptors stay unevaluated."""
    try:
        namespace = vars(owner)
    except TypeError:
        raise PatchError(f"{owner!r} has no __dict__, so {name!r} on it cannot be patched and restored") from None
    return namespace.get(name, NOTSET)


class Journal:
    """A list of changes and how to undo each. Threads may write to it at the same time."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._lock = threading.RLock()

    @property
    def records(self) -> tuple[Record, ...]:
        """What stands now, oldest first."""
        with self._lock:
            return tuple(entry.record for entry in self._entries)

    def set_attr(
        self, owner: object, name: str, value: object, *, target: str, reason: str = "", remove_when: str = ""
    ) -> None:
        """Set ``owner.name`` to exactly ``value``: whoever replaces a staticmethod passes a staticmethod.

        ``target`` is the dotted name for people. Raises PatchError when the owner cannot hold the attribute.
        """
        slot = _Slot(
            owner,
            name,
            read=lambda: raw_entry(owner, name),
            write=lambda v: setattr(owner, name, v),
            erase=lambda: delattr(owner, name),
        )
        self._change(slot, value, Record(target, reason, remove_when))

    def set_item(
        self,
        mapping: MutableMapping[Any, Any],
        key: Any,
        value: object,
        *,
        target: str,
        reason: str = "",
        remove_when: str = "",
    ) -> None:
        """Set ``mapping[key]``: a registry of a framework, or ``os.environ``."""
        self._change(_item(mapping, key), value, Record(target, reason, remove_when))

    def remove_item(
        self, mapping: MutableMapping[Any, Any], key: Any, *, target: str, reason: str = "", remove_when: str = ""
    ) -> None:
        """Take ``mapping[key]`` away. Raises PatchError if it is not there."""
        self._change(_item(mapping, key), NOTSET, Record(target, reason, remove_when))

    def add_undo(self, undo: Callable[[], None], *, target: str, reason: str = "", remove_when: str = "") -> None:
        """Note a change that was made elsewhere, with what takes it back. ``undo`` is called once."""
        with self._lock:
            self._entries.append(_Entry(Record(target, reason, remove_when), undo=undo))

    def conflicts(self) -> list[str]:
        """Changes of ours that somebody else has overwritten or removed since, each with what was found."""
        with self._lock:
            found: list[str] = []
            newest: list[_Slot] = []  # a place that we changed twice is judged by our last word only
            for entry in reversed(self._entries):
                slot = entry.slot
                if slot is None or any(slot.is_same_place(seen) for seen in newest):
                    continue
                newest.append(slot)
                current = slot.read()
                if not _same(current, entry.ours):
                    found.append(f"{entry.record.target} (now {current!r})")
            return found

    def rollback(self, *, force: bool = False) -> None:
        """Undo everything, newest first, each place to the identical object that stood there before.

        If somebody else changed one of the places meanwhile, restoring would throw their change away and leaving
        it would keep ours inside theirs. So nothing at all is undone and ConflictError names the places; the caller
        may remove the other change and call again. ``force=True`` (after a failed set-up, where staying as we are
        is no option) undoes the rest and leaves the disputed places alone; then too ConflictError names them.

        Raises PatchError, after everything else was undone, when an undo itself failed.
        """
        with self._lock:
            disputed = self.conflicts()
            if disputed and not force:
                raise ConflictError(_conflict_text(disputed, "nothing was undone"))
            failures: list[tuple[str, Exception]] = []
            left: list[_Slot] = []
            while self._entries:
                entry = self._entries.pop()
                try:
                    _undo(entry, left)
                except Exception as error:
                    failures.append((entry.record.target, error))
            if failures:
                names = "; ".join(f"{target}: {type(error).__name__}: {error}" for target, error in failures)
                raise PatchError(f"could not undo {names}; everything else was undone") from failures[0][1]
            if disputed:
                raise ConflictError(_conflict_text(disputed, "these were left as they are, all else was undone"))

    def _change(self, slot: _Slot, value: object, record: Record) -> None:
        with self._lock:
            before = slot.read()
            entry = _Entry(record, slot=slot, before=before, ours=value)
            try:
                slot.erase() if value is NOTSET else slot.write(value)
            except Exception as error:
                raise PatchError(f"{record.target} cannot be changed: {type(error).__name__}: {error}") from error
            if not _same(slot.read(), value):
                with contextlib.suppress(Exception):
                    slot.erase() if before is NOTSET else slot.write(before)
                raise PatchError(f"{record.target} does not keep what is set on it, so it cannot be patched")
            self._entries.append(entry)


def _undo(entry: _Entry, left: list[_Slot]) -> None:
    if entry.slot is None:
        assert entry.undo is not None
        entry.undo()
        return
    slot = entry.slot
    if any(slot.is_same_place(other) for other in left):
        return
    if not _same(slot.read(), entry.ours):
        left.append(slot)
    elif entry.before is NOTSET:
        slot.erase()
    else:
        slot.write(entry.before)


def _same(current: object, ours: object) -> bool:
    """Identity; strings by value, since ``os.environ`` hands out a new object at every read."""
    return current is ours or (isinstance(current, str) and isinstance(ours, str) and current == ours)


def _conflict_text(disputed: list[str], outcome: str) -> str:
    return (
        f"somebody else changed {', '.join(disputed)} after it was patched; {outcome}. "
        f"Take the other change back first, then call disable() again"
    )
