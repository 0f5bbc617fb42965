"""Look-ups in a directory of checkpoints: the latest one, the steps, a step by its number, everything."""

from __future__ import annotations

from collections.abc import Sequence

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._core.object_store import client
from flax_ckpt_compat._discovery import listing, notices
from flax_ckpt_compat._discovery.directory import Directory, Entry, Judged, State, list_again_while_it_changes


def latest(where: listing.CheckpointDir) -> Entry | None:
    """Return the latest checkpoint that look-ups name, or None."""
    return list_again_while_it_changes(where.directory, lambda last: latest_of(Directory(where, tolerant=last)))


def latest_of(directory: Directory) -> Entry | None:
    """Return the latest checkpoint of one listing, judging the newest first and no more than need be.

    Raises:
        ChangedError: list again.
    """
    skipped: list[Judged] = []
    where = directory.where
    for tier in directory.tiers():
        for entry in reversed(tier):
            judged = directory.judge(entry)
            if judged.counts and _may_be_latest(directory, tier, judged):
                _warn_of_skipped(where, skipped)
                if tier is directory.longer:
                    _warn_of_longer(where, entry)
                return entry
            if judged.state is State.INCOMPLETE:
                skipped.append(judged)
    directory.check_unchanged()
    _warn_of_skipped(where, skipped)
    return None


def _may_be_latest(directory: Directory, tier: Sequence[Entry], judged: Judged) -> bool:
    if tier is directory.longer:
        return judged.state is State.COMPLETE and listing.is_checkpoint(judged.entry.path)
    return _is_listed(directory, judged)


def available(where: listing.CheckpointDir) -> list[Entry]:
    """Return the steps that look-ups name, oldest first, each number once; warn of incomplete ones."""

    def look(last: bool) -> list[Entry]:
        directory = Directory(where, tolerant=last)
        found = _judged_steps(directory)
        if not any(judged.counts for judged in found):
            directory.check_unchanged()
        _warn_of_skipped(where, [judged for judged in found if judged.state is State.INCOMPLETE])
        counted = [judged.entry for judged in found if judged.counts]
        shadowed = {entry.step for entry in counted if not entry.managed}
        return [entry for entry in counted if not (entry.managed and entry.step in shadowed)]

    return list_again_while_it_changes(where.directory, look)


def everything_of(directory: Directory) -> list[Judged]:
    """Return every checkpoint of one listing, the unfinished and foreign ones too: steps, then ``prefix + text``.

    Raises:
        ChangedError: list again.
    """
    found = _judged_steps(directory) + [directory.judge(entry) for entry in directory.texts]
    ours = [judged for judged in found if _is_listed(directory, judged)]
    if not ours:
        directory.check_unchanged()
    return ours


def _is_listed(directory: Directory, judged: Judged) -> bool:
    if judged.state is not State.FOREIGN:
        return judged.state is not State.VANISHED
    # Without a prefix every other folder of the directory would be one.
    return judged.counts and (judged.entry.step is not None or bool(directory.where.prefix))


def _judged_steps(directory: Directory) -> list[Judged]:
    entries = directory.steps or directory.other_family
    if paths.is_url(directory.where.directory):
        client.prefetch_sizes([entry.path for entry in entries if paths.isfile(entry.path)])
    return [directory.judge(entry) for entry in entries]


def find_step(where: listing.CheckpointDir, number: float) -> Entry | None:
    """Return the checkpoint of a step by its number, however its name spells it (7, 7.0, 007), or None."""

    def look(last: bool) -> Entry | None:
        directory = Directory(where, tolerant=last)
        found = [entry for entry in directory.steps or directory.other_family if entry.step == number]
        return found[-1] if found else None

    return list_again_while_it_changes(where.directory, look)


def _warn_of_skipped(where: listing.CheckpointDir, skipped: Sequence[Judged]) -> None:
    shown = "; ".join(
        f"{judged.entry.name} ({judged.why})" for judged in sorted(skipped, key=lambda one: one.entry.name)
    )
    message = f"Skipping incomplete checkpoints in {where.directory}: {shown}" if skipped else None
    notices.tell_once((where.directory, where.prefix, "incomplete"), message)


def _warn_of_longer(where: listing.CheckpointDir, entry: Entry) -> None:
    notices.tell_once(
        (where.directory, where.prefix, "longer"),
        f"{where.directory} holds no checkpoint with exactly the prefix {where.prefix!r}; taking {entry.name}, the "
        "last name that begins with it, as Flax does: pass the whole prefix",
    )
