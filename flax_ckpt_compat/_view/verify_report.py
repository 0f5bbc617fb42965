"""Define the reports of `verify`."""

from __future__ import annotations

import dataclasses
from typing import Literal

from flax_ckpt_compat._view import verify_text

State = Literal["ok", "unverified", "damaged", "unreadable"]


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedLeaf:
    """One leaf of a verified checkpoint.

    Attributes:
        path: its key path, joined with ``/``.
        state: ``ok`` (it decodes, and its checksums hold), ``unverified`` (it decodes, and has no checksums),
            ``damaged``, or ``unreadable`` (the file system or store refused).
        why: what is wrong with it; else empty.
        nbytes: size in memory, in bytes.
    """

    path: str
    state: State
    why: str
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """One verified checkpoint.

    Attributes:
        path: absolute path, or URL.
        format: ``msgpack`` or ``orbax``; empty if it cannot be opened.
        leaves: every leaf.
        damage: what is wrong beside the leaves: why it cannot be opened, or which file does not decode.
        unexpected: what lies in it and belongs to no leaf, as relative paths with notes.
        readable: false if the file system or store refused to open it.
    """

    path: str
    format: str
    leaves: tuple[VerifiedLeaf, ...]
    damage: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    readable: bool = True

    @property
    def state(self) -> State:
        """Return the worst state of its leaves and files; ``unverified`` if any of them has no checksums."""
        if not self.readable:
            return "unreadable"
        states = {leaf.state for leaf in self.leaves}
        if self.damage or "damaged" in states:
            return "damaged"
        return "unreadable" if "unreadable" in states else "unverified" if "unverified" in states else "ok"

    @property
    def nbytes(self) -> int:
        """Return the size of all leaves in memory, in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`; prints as text.

    Attributes:
        path: what was verified.
        checkpoints: every checkpoint there.
    """

    path: str
    checkpoints: tuple[VerifiedCheckpoint, ...]

    @property
    def ok(self) -> bool:
        """Return whether every leaf of every checkpoint decodes, and no checksum is wrong."""
        return all(checkpoint.state in ("ok", "unverified") for checkpoint in self.checkpoints)

    @property
    def verified(self) -> bool:
        """Return whether also every leaf has checksums, and nothing unexpected is there."""
        return all(checkpoint.state == "ok" and not checkpoint.unexpected for checkpoint in self.checkpoints)

    def __str__(self) -> str:
        return "\n".join([*map(verify_text.of_checkpoint, self.checkpoints), verify_text.summary(self.checkpoints)])
