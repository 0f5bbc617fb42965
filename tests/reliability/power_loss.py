"""Replay the record of a shim, and lose power at every point of it: what was not synced may be lost in every way.

The model is stricter than any file system in use. A file holds what it held at its last sync, and of what was written
since all, half, nothing, zeros or anything else. A directory holds the names of its last sync, and of the changes
since any subset; one rename or exchange is whole. Syncing a file does not sync its name, and syncing a directory
neither its files nor its own name. The parent of the directory that is recorded is there.
"""

import dataclasses
import hashlib
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

_HEAD = struct.Struct("=IIQqqIIQ")
_OPS = ("create", "write", "truncate", "mkdir", "rmdir", "unlink", "rename", "exchange", "link", "symlink", "fsync")
_OPS += ("xattr", "mark", "hint")
Names = dict[str, Any]  # name → _File or _Folder


@dataclasses.dataclass(frozen=True)
class Call:
    """One record: a call that succeeded, or a mark."""

    op: str
    inode: int
    a: int
    first: str
    second: str
    data: bytes


def read_record(path: str) -> Iterator[Call]:
    """Yield the calls of a record, in their order."""
    with open(path, "rb") as file:
        while head := file.read(_HEAD.size):
            op, _, inode, a, _, first, second, size = _HEAD.unpack(head)
            names = [os.fsdecode(file.read(length)) for length in (first, second)]
            yield Call(_OPS[op], inode, a, *names, file.read(size))


@dataclasses.dataclass(eq=False)
class _File:
    live: bytearray = dataclasses.field(default_factory=bytearray)
    synced: bytes | None = b""  # None: never synced
    attributes: dict[str, bytes] = dataclasses.field(default_factory=dict)
    synced_attributes: dict[str, bytes] = dataclasses.field(default_factory=dict)
    written: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # since the last sync

    def write(self, offset: int, data: bytes) -> None:
        self.resize(max(len(self.live), offset + len(data)))
        self.live[offset : offset + len(data)] = data
        self.written.append((offset, offset + len(data)))

    def resize(self, size: int) -> None:
        if size != len(self.live):
            self.written.append((min(size, len(self.live)), size))
        del self.live[size:]
        self.live.extend(bytes(size - len(self.live)))

    def sync(self) -> None:
        self.synced, self.synced_attributes, self.written = bytes(self.live), dict(self.attributes), []

    def lost(self, how: str, chance: random.Random) -> tuple[bytes, dict[str, bytes]]:
        """Return what is on disk after the loss: bytes and attributes."""
        if not self.written and self.attributes == self.synced_attributes:
            return bytes(self.live), self.attributes
        synced = self.synced or b""
        if how == "mixed":
            how = chance.choice(("kept", "nothing", "zeros", "half", "junk"))
        attributes = self.attributes if how == "kept" else self.synced_attributes
        if how == "kept" or not self.written:
            return bytes(self.live), attributes
        if how == "nothing":
            return synced, attributes
        if how == "half":
            last = self.written[-1]
            return bytes(self.live[: (last[0] + last[1]) // 2]), attributes
        disk = bytearray(self.live)
        for start, end in self.written:
            disk[start:end] = (
                bytes(max(0, len(disk[start:end]))) if how == "zeros" else chance.randbytes(len(disk[start:end]))
            )
        return bytes(disk), attributes


@dataclasses.dataclass(eq=False)
class _Folder:
    live: Names = dataclasses.field(default_factory=dict)
    synced: Names = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Change:
    """A change of names that a loss of power may undo: what was and what is under each name."""

    names: list[tuple[_Folder, str, Any, Any]]


class Disk:
    """A directory as the system shows it and as the disk holds it."""

    def __init__(self, root: str):
        """Start with an empty directory that is on disk."""
        self._root, self._path = _Folder(), os.path.realpath(root)
        self._files: dict[int, _File] = {}
        self._pending: list[_Change] = []

    def apply(self, call: Call) -> None:
        """Do what a call did."""
        getattr(self, f"_{call.op}")(call)

    def _parent(self, path: str) -> tuple[_Folder, str]:
        relative = os.path.relpath(path, self._path)
        *folders, name = relative.split("/")
        folder = self._root
        for part in folders:
            folder = folder.live[part]
        return folder, name

    def _at(self, path: str) -> Any:
        folder, name = self._parent(path)
        return self._root if name == "." else folder.live.get(name)

    def _change(self, *names: tuple[str, Any]) -> None:
        change = []
        for path, held in names:
            folder, name = self._parent(path)
            change.append((folder, name, folder.live.get(name), held))
        for folder, name, _, held in change:
            if held is None:
                folder.live.pop(name, None)
            else:
                folder.live[name] = held
        self._pending.append(_Change(change))

    def _create(self, call: Call) -> None:
        self._files[call.inode] = _File(synced=None)
        self._change((call.first, self._files[call.inode]))

    def _write(self, call: Call) -> None:
        self._files[call.inode].write(call.a, call.data)

    def _truncate(self, call: Call) -> None:
        self._files[call.inode].resize(call.a)

    def _xattr(self, call: Call) -> None:
        self._files[call.inode].attributes[call.second] = call.data

    def _mkdir(self, call: Call) -> None:
        self._change((call.first, _Folder()))

    def _rmdir(self, call: Call) -> None:
        self._change((call.first, None))

    _unlink = _rmdir

    def _rename(self, call: Call) -> None:
        moved = self._at(call.first)
        if moved is not self._at(call.second):
            self._change((call.first, None), (call.second, moved))

    def _exchange(self, call: Call) -> None:
        first, second = self._at(call.first), self._at(call.second)
        self._change((call.first, second), (call.second, first))

    def _link(self, call: Call) -> None:
        self._change((call.second, self._at(call.first)))

    def _fsync(self, call: Call) -> None:
        file = self._files.get(call.inode)
        # The inode of a removed file may be that of a new directory.
        folder = self._at(call.first)
        if isinstance(folder, _Folder):
            self._sync_names(folder)
        elif file is not None:
            file.sync()

    def _sync_names(self, folder: _Folder) -> None:
        waiting = []
        for change in self._pending:
            if any(where is folder for where, *_ in change.names):
                _undergo(change, lambda where: where.synced)
            else:
                waiting.append(change)
        self._pending = waiting

    def _mark(self, call: Call) -> None: ...

    def _hint(self, call: Call) -> None: ...

    def losses(self, chance: random.Random, samples: int) -> Iterator[dict[str, Any]]:
        """Yield trees of what may be on disk now: name → bytes and attributes, or another tree."""
        count = len(self._pending)
        every, none = set(range(count)), set[int]()
        single = [{number} for number in range(count)]
        subsets = [every, none, *(every - one for one in single), *single, *(set(range(n)) for n in range(1, count))]
        plans = [(every, how) for how in ("kept", "nothing", "zeros", "half", "junk")]
        plans += [(subset, how) for subset in subsets for how in ("kept", "nothing")]
        chance.shuffle(plans[5:])
        plans = plans[: 5 + samples]
        plans += [({n for n in every if chance.random() < 0.5}, "mixed") for _ in range(samples)]
        for subset, how in plans:
            yield self._on_disk(subset, how, chance)

    def _on_disk(self, survivors: set[int], how: str, chance: random.Random) -> dict[str, Any]:
        names: dict[int, Names] = {}

        def of(folder: _Folder) -> Names:
            return names.setdefault(id(folder), dict(folder.synced))

        for number, change in enumerate(self._pending):
            if number in survivors:
                _undergo(change, of)
        lost: dict[int, Any] = {}

        def grow(held: Any) -> Any:
            if id(held) not in lost:
                if isinstance(held, _Folder):
                    lost[id(held)] = {name: grow(inner) for name, inner in sorted(of(held).items())}
                else:
                    lost[id(held)] = held.lost(how, chance)
            return lost[id(held)]

        tree: dict[str, Any] = grow(self._root)
        return tree


def _undergo(change: _Change, names_of: Any) -> None:
    for folder, name, was, held in change.names:
        names = names_of(folder)
        if held is not None:
            names[name] = held
        elif names.get(name) is was:
            names.pop(name, None)


def digest(tree: Any) -> bytes:
    """Return a hash of a tree of names and contents."""
    found = hashlib.blake2b(digest_size=16)
    if isinstance(tree, tuple):
        found.update(b"file" + tree[0] + repr(sorted(tree[1].items())).encode())
    else:
        for name, held in tree.items():
            found.update(os.fsencode(name) + b"\0" + digest(held))
    return found.digest()


def materialise(tree: dict[str, Any], path: str) -> None:
    """Write a tree into a new directory."""
    os.mkdir(path)
    for name, held in tree.items():
        inner = os.path.join(path, name)
        if isinstance(held, dict):
            materialise(held, inner)
        else:
            with open(inner, "wb") as file:
                file.write(held[0])
            for attribute, value in held[1].items():
                os.setxattr(inner, attribute, value)
