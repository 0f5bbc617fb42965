"""Walk a tree of runs: its directories, and the checkpoints in them, of any prefix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from flax_ckpt_compat._core.errors import MissingPathError, PermissionDeniedError, StorageError
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery import contents, foreign, locating, steps
from flax_ckpt_compat._discovery.contents import Layout, State, contents_of, is_step_of_manager
from flax_ckpt_compat._discovery.orbax_directory import MARKERS, names_in

DEFAULT_PREFIX = "checkpoint_"
MSGPACK_SUFFIX = ".msgpack"


def checkpoints_below(root: Location) -> list[Location]:
    """Return the location of every checkpoint below a path, or the path itself if it is one; unfinished ones too.

    A directory that the system refuses to list counts, as it may be one. Files count if they are named
    ``checkpoint_…`` or ``….msgpack``, or ``prefix + step`` if one of that prefix in the directory begins like Flax's.
    """
    listed = root.listed()
    if not listed.exists():
        raise locating.absent(root).error(root)
    if not listed.isdir() or contents.is_certainly_orbax(listed):
        return [root]
    denied: list[StorageError] = []
    found = [path.unlisted() for _, inside in folders_below(listed, denied) for path in inside]
    found += [root.at(error.path).unlisted() for error in denied if error.path is not None]
    return found or ([root] if _is_checkpoint(listed) else [])


def folders_below(root: Location, denied: list[StorageError]) -> Iterator[tuple[Location, list[Location]]]:
    """Yield a directory and all below it that are not checkpoints, each with the checkpoints directly in it.

    Each is visited once, whatever links lead to it. ``denied`` takes the errors of those below that the system refuses
    to list, such as ``lost+found``."""
    seen, pending = {root.resolve()}, [root]
    while pending:
        folder = pending.pop()
        try:
            names = steps.natural_sort(folder.listdir(), signed=False)
        except MissingPathError:
            if folder == root:
                raise
            continue  # another program removed it meanwhile
        checkpoints, folders = list[Location](), list[Location]()
        is_prefix = functools.cache(functools.partial(_is_prefix, folder, names))
        is_manager = any(is_step_of_manager(folder / name) for name in names if name.isdecimal())
        for path in (folder / name for name in names if not steps.is_foreign(name)):
            if not path.isdir():
                checkpoints += [path] if _is_checkpoint_file(path, is_prefix) else []
            elif (resolved := path.resolve()) not in seen:
                seen.add(resolved)
                try:
                    is_one = _is_checkpoint_folder(path, may_be_step=is_manager and path.name.isdecimal())
                    (checkpoints if is_one else folders).append(path)
                except MissingPathError:
                    pass  # another program removed it meanwhile
                except PermissionDeniedError as error:
                    denied.append(error)
        yield folder, checkpoints
        pending += reversed(folders)


def _is_checkpoint_file(path: Location, is_prefix: Callable[[str], bool]) -> bool:
    split = steps.split_step(path.name)
    if not (_is_named(path.name) or path.name.endswith(MSGPACK_SUFFIX) or (split and is_prefix(split[0]))):
        return False
    found = contents_of(path)
    # The first bytes of a damaged checkpoint may look like nothing that is known.
    return found.state is not State.FOREIGN or foreign.is_unknown_look(found.why)


def _is_checkpoint_folder(path: Location, *, may_be_step: bool) -> bool:
    """Return whether a folder is a checkpoint, or an empty one by its name; raise if it may not be listed."""
    try:
        return ((may_be_step or _is_named(path.name)) and not path.listdir()) or _is_checkpoint(path)
    except PermissionDeniedError as error:
        if error.path in (None, path.path):
            raise
        return bool(names_in(path).intersection(MARKERS))  # something in it is denied


def _is_named(name: str) -> bool:
    return steps.step_of(name, DEFAULT_PREFIX) is not None or steps.is_text(name, DEFAULT_PREFIX)


def _is_checkpoint(path: Location) -> bool:
    found = contents_of(path)
    if found.layout is Layout.ARRAYS and not steps.split_step(path.name):
        return False  # rather a data set
    return found.is_one_checkpoint or (found.state is State.INCOMPLETE and found.is_marked)


def _is_prefix(folder: Location, names: list[str], prefix: str) -> bool:
    """Return whether a directory's numbered files of a prefix are checkpoints, judged by the first bytes of some."""
    files = (folder / name for name in names if name.startswith(prefix) and steps.split_step(name))
    return any(file.isfile() and foreign.may_be_msgpack_tree(file) for file in files)
