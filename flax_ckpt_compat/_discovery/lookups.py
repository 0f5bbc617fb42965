"""Look up checkpoints in a directory: the latest, the steps, a step by number, everything."""

from __future__ import annotations

from collections.abc import Sequence

from flax_ckpt_compat._core import paths
from flax_ckpt_compat._discovery import listing, notices
from flax_ckpt_compat._discovery.directory import Classified, Directory, Entry, State, list_again_while_it_changes


def latest(checkpoint_dir: listing.CheckpointDir) -> Entry | None:
    """Return the latest checkpoint, or None."""
    return list_again_while_it_changes(
        checkpoint_dir.directory, lambda last: latest_of(Directory(checkpoint_dir, tolerant=last))
    )


def latest_of(directory: Directory) -> Entry | None:
    """Return the latest checkpoint of one listing, classifying entries newest first and as few as possible.

    Raises:
        ChangedError: list again.
    """
    skipped: list[Classified] = []
    checkpoint_dir = directory.checkpoint_dir
    for tier in directory.tiers():
        for entry in reversed(tier):
            classified = directory.classify(entry)
            if classified.counts and _may_be_latest(directory, tier, classified):
                _warn_of_skipped(checkpoint_dir, skipped)
                if tier is directory.longer:
                    _warn_of_longer(checkpoint_dir, entry)
                return entry
            if classified.state is State.INCOMPLETE:
                skipped.append(classified)
    directory.check_unchanged()
    _warn_of_skipped(checkpoint_dir, skipped)
    return None


def _may_be_latest(directory: Directory, tier: Sequence[Entry], classified: Classified) -> bool:
    if tier is directory.longer:
        return classified.state is State.COMPLETE and listing.is_checkpoint(classified.entry.path)
    return _is_listed(directory, classified)


def available(checkpoint_dir: listing.CheckpointDir) -> list[Entry]:
    """Return the available steps, oldest first, each number once; warn about incomplete ones."""

    def look(last: bool) -> list[Entry]:
        directory = Directory(checkpoint_dir, tolerant=last)
        found = _classified_steps(directory)
        if not any(classified.counts for classified in found):
            directory.check_unchanged()
        _warn_of_skipped(checkpoint_dir, [classified for classified in found if classified.state is State.INCOMPLETE])
        counted = [classified.entry for classified in found if classified.counts]
        shadowed = {entry.step for entry in counted if not entry.managed}
        return [entry for entry in counted if not (entry.managed and entry.step in shadowed)]

    return list_again_while_it_changes(checkpoint_dir.directory, look)


def everything_of(directory: Directory) -> list[Classified]:
    """Return every checkpoint of one listing, the unfinished and foreign ones too: steps, then ``prefix + text``.

    Raises:
        ChangedError: list again.
    """
    found = _classified_steps(directory) + [directory.classify(entry) for entry in directory.texts]
    ours = [classified for classified in found if _is_listed(directory, classified)]
    if not ours:
        directory.check_unchanged()
    return ours


def _is_listed(directory: Directory, classified: Classified) -> bool:
    if classified.state is not State.FOREIGN:
        return classified.state is not State.VANISHED
    # Without a prefix every other folder of the directory would count.
    return classified.counts and (classified.entry.step is not None or bool(directory.checkpoint_dir.prefix))


def _classified_steps(directory: Directory) -> list[Classified]:
    entries = directory.steps or directory.other_family
    storage = paths.storage_of(directory.checkpoint_dir.directory)
    if storage.is_remote:
        storage.prefetch_sizes([entry.path for entry in entries if storage.isfile(entry.path)])
    return [directory.classify(entry) for entry in entries]


def find_step(checkpoint_dir: listing.CheckpointDir, number: float) -> Entry | None:
    """Return the checkpoint of a step number, however it is spelt (7, 7.0, 007), or None."""

    def look(last: bool) -> Entry | None:
        directory = Directory(checkpoint_dir, tolerant=last)
        found = [entry for entry in directory.steps or directory.other_family if entry.step == number]
        return found[-1] if found else None

    return list_again_while_it_changes(checkpoint_dir.directory, look)


def _warn_of_skipped(checkpoint_dir: listing.CheckpointDir, skipped: Sequence[Classified]) -> None:
    shown = "; ".join(
        f"{classified.entry.name} ({classified.why})" for classified in sorted(skipped, key=lambda one: one.entry.name)
    )
    message = f"Skipping incomplete checkpoints in {checkpoint_dir.directory}: {shown}" if skipped else None
    notices.log_once((checkpoint_dir.directory, checkpoint_dir.prefix, "incomplete"), message)


def _warn_of_longer(checkpoint_dir: listing.CheckpointDir, entry: Entry) -> None:
    notices.log_once(
        (checkpoint_dir.directory, checkpoint_dir.prefix, "longer"),
        f"{checkpoint_dir.directory} holds no checkpoint with exactly the prefix {checkpoint_dir.prefix!r}; taking "
        f"{entry.name}, the last name that begins with it, as Flax does: pass the whole prefix",
    )
