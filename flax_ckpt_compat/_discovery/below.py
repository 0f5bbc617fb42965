"""Find all checkpoints below a directory, of any prefix: a tree of runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from flax_ckpt_compat._core import module_names, paths, steps
from flax_ckpt_compat._core.errors import CheckpointNotFoundError
from flax_ckpt_compat._core.storage_errors import translated
from flax_ckpt_compat._discovery import absence, detect, foreign

_DEFAULT_PREFIX = "checkpoint_"
_NUMBERED = re.compile(r"(.*?)\d+(?:\.\d*)?(?:[eE][-+]?\d+)?", re.DOTALL)
_MSGPACK_SUFFIX = ".msgpack"


def checkpoints_below(root: str) -> Iterator[str]:
    """Yield the path of every checkpoint below a path, or the path itself if it is one; unfinished ones too.

    Directories are visited once, whatever links lead to them. Files count if they are named ``checkpoint_…`` or
    ``….msgpack``, or ``prefix + step`` if one of that prefix in the directory begins like Flax's.

    Args:
        root: absolute path, or URL.

    Raises:
        CheckpointNotFoundError: it does not exist.
        StorageError: the file system refused.
    """
    with paths.listing_cache(root):
        if not paths.lexists(root):
            raise CheckpointNotFoundError(absence.of_directory(root).why, path=root)
        if not paths.isdir(root) or _is_one(root):
            yield root
            return
        found = list(_below(root, {paths.storage_of(root).resolve(root)}))
        if not found and (detect.is_orbax_directory(root) or detect.is_unfinished(root)):
            found = [root]
    yield from found


def _is_one(path: str) -> bool:
    return not detect.has_no_orbax_marker(path) and (detect.is_orbax_directory(path) or detect.is_unfinished(path))


def _below(directory: str, seen: set[str]) -> Iterator[str]:
    with translated(directory):
        names = module_names.natural_sort(paths.listdir(directory), signed=False)
    prefixes = _Prefixes(directory)
    for name in names:
        path = os.path.join(directory, name)
        if steps.is_foreign(name):
            continue
        if not paths.isdir(path):
            if _is_named_checkpoint(name) or name.endswith(_MSGPACK_SUFFIX) or prefixes.include(names, name):
                yield path
            continue
        resolved = paths.storage_of(path).resolve(path)
        if resolved in seen:
            continue
        seen.add(resolved)
        is_empty_step = _is_named_checkpoint(name) and not paths.listdir(path)
        if is_empty_step or detect.is_orbax_directory(path) or detect.is_unfinished(path):
            yield path
        else:
            yield from _below(path, seen)


def _is_named_checkpoint(name: str) -> bool:
    return steps.step_of(name, _DEFAULT_PREFIX) is not None or steps.is_text(name, _DEFAULT_PREFIX)


class _Prefixes:
    """Which prefixes of a directory's numbered files are those of checkpoints, judged by the first bytes of some."""

    def __init__(self, directory: str):
        self._directory = directory
        self._known: dict[str, bool] = {}

    def include(self, names: list[str], name: str) -> bool:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            return False
        prefix = match[1]
        if prefix not in self._known:
            alike = (other for other in names if other.startswith(prefix) and _NUMBERED.fullmatch(other))
            files = [os.path.join(self._directory, other) for other in alike]
            self._known[prefix] = any(paths.isfile(file) and foreign.may_be_msgpack_tree(file) for file in files)
        return self._known[prefix]
