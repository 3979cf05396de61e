"""The undo journal: every write to foreign code goes through it and is undone in reverse order.

The journal stores the raw ``__dict__`` entry (the ``staticmethod`` object, not its function), or NOTSET if the owner inherits the
name. Undo then deletes the attribute, and the inherited one is visible again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from jetrl_patch.errors import ConflictError, PatchError, explain


class _NotSet:
    def __repr__(self) -> str:
        return "NOTSET"


NOTSET: Final = _NotSet()


@dataclass(frozen=True)
class Record:
    """One change: its dotted target, its reason, and the upstream change that makes it obsolete."""

    target: str
    reason: str = ""
    remove_when: str = ""


@dataclass
class _Slot:
    """A place to read and write: an attribute or an item. To write NOTSET is to delete it."""

    owner: Any
    key: Any
    read: Callable[[], object]
    write: Callable[[object], None]

    def is_same_place(self, other: _Slot) -> bool:
        return self.owner is other.owner and type(self.key) is type(other.key) and bool(self.key == other.key)


def _attribute(owner: object, name: str) -> _Slot:
    def write(value: object) -> None:
        delattr(owner, name) if value is NOTSET else setattr(owner, name, value)

    return _Slot(owner, name, functools.partial(raw_entry, owner, name), write)


def _item(mapping: MutableMapping[Any, Any], key: Any) -> _Slot:
    def write(value: object) -> None:
        mapping.__delitem__(key) if value is NOTSET else mapping.__setitem__(key, value)

    return _Slot(mapping, key, functools.partial(mapping.get, key, NOTSET), write)


@dataclass
class _Entry:
    record: Record
    slot: _Slot | None = None
    before: object = NOTSET
    after: object = NOTSET
    undo: Callable[[], None] | None = None


def raw_entry(owner: object, name: str) -> object:
    """The entry of this name in the owner's own ``__dict__``, or NOTSET. Descriptors are not evaluated."""
    try:
        namespace = vars(owner)
    except TypeError:
        raise PatchError(f"{owner!r} has no __dict__, so its attribute {name!r} cannot be patched and restored.") from None
    return namespace.get(name, NOTSET)


class Journal:
    """A list of changes and how to undo them. Thread-safe. ``record`` is always the fields of a ``Record``, by name."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._lock = threading.RLock()

    @property
    def records(self) -> tuple[Record, ...]:
        """The changes that are in place, oldest first."""
        with self._lock:
            return tuple(entry.record for entry in self._entries)

    def set_attr(self, owner: object, name: str, value: object, **record: str) -> None:
        """Set ``owner.name`` to ``value`` as it is; to replace a staticmethod, pass a staticmethod.

        Raises PatchError if the owner does not keep the attribute.
        """
        self._change(_attribute(owner, name), value, Record(**record))

    def set_item(self, mapping: MutableMapping[Any, Any], key: Any, value: object, **record: str) -> None:
        """Set ``mapping[key]``, for instance in a framework's registry or ``os.environ``."""
        self._change(_item(mapping, key), value, Record(**record))

    def remove_item(self, mapping: MutableMapping[Any, Any], key: Any, **record: str) -> None:
        """Remove ``mapping[key]``. Raises PatchError if there is no such key."""
        self._change(_item(mapping, key), NOTSET, Record(**record))

    def add_undo(self, undo: Callable[[], None], **record: str) -> None:
        """Record a change that was made elsewhere. ``undo`` reverts it and is called once."""
        with self._lock:
            self._entries.append(_Entry(Record(**record), undo=undo))

    def conflicts(self) -> list[str]:
        """The changes that other code has overwritten or removed, each with what was found."""
        with self._lock:
            found: list[str] = []
            newest: list[_Slot] = []  # of two changes to one place only the last counts
            for entry in reversed(self._entries):
                slot = entry.slot
                if slot is None or any(slot.is_same_place(seen) for seen in newest):
                    continue
                newest.append(slot)
                current = slot.read()
                if not _same(current, entry.after):
                    found.append(f"{entry.record.target} (now {current!r})")
            return found

    def rollback(self, *, force: bool = False) -> None:
        """Undo all changes, newest first. Each place gets back the identical object that it held before.

        If other code has changed one of the places since, restoring it would lose that change, and leaving it could keep this one
        inside it. Then nothing is undone, and the caller can call again once the other change is removed. With ``force=True``,
        after a failed set-up, everything else is undone and those places are left alone.

        Raises:
            ConflictError: other code has changed some of the places; the message names them.
            PatchError: an undo step failed. Everything else is undone.
        """
        with self._lock:
            disputed = self.conflicts()
            if disputed and not force:
                raise ConflictError(_conflict_text(disputed, "nothing is undone"))
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
                raise PatchError(f"Could not undo {names}. Everything else is undone.") from failures[0][1]
            if disputed:
                raise ConflictError(_conflict_text(disputed, "everything else is undone"))

    def _change(self, slot: _Slot, value: object, record: Record) -> None:
        with self._lock:
            before = slot.read()
            entry = _Entry(record, slot=slot, before=before, after=value)
            try:
                slot.write(value)
            except Exception as error:
                raise PatchError(f"{record.target} cannot be changed. {type(error).__name__}: {error}") from error
            if not _same(slot.read(), value):
                with contextlib.suppress(Exception):
                    slot.write(before)
                raise PatchError(f"{record.target} cannot be patched: it does not keep the value set on it.")
            self._entries.append(entry)


def _undo(entry: _Entry, left: list[_Slot]) -> None:
    if entry.slot is None:
        assert entry.undo is not None
        entry.undo()
        return
    slot = entry.slot
    if any(slot.is_same_place(other) for other in left):
        return
    if _same(slot.read(), entry.after):
        slot.write(entry.before)
    else:
        left.append(slot)


def _same(current: object, after: object) -> bool:
    """Compare by identity, but strings by value: ``os.environ`` returns a new object at every read."""
    return current is after or (isinstance(current, str) and isinstance(after, str) and current == after)


def _conflict_text(disputed: list[str], outcome: str) -> str:
    return explain(
        ", ".join(disputed),
        required="the value that enable() set",
        found=f"a change by other code; {outcome}",
        fix="revert that change, then call disable() again",
    )
