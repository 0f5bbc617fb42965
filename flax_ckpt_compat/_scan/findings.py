"""Define the kinds of findings of `flax-ckpt scan`: what breaks once checkpoints are directories, and what to do."""

from __future__ import annotations

from typing import NamedTuple

CHANGE, CHECK, NOTHING = "change", "check", "nothing"  # what a finding asks for: of the code, a look at it


class Kind(NamedTuple):
    """A kind of finding."""

    title: str  # What the code does
    happens: str  # What happens once ``flax_use_orbax_checkpointing`` is true
    remedy: str = ""  # What to do, or "" for nothing
    action: str = CHANGE  # `CHANGE`, `CHECK` or `NOTHING`


KINDS = {  # in the order in which a person should look
    "remove": Kind(
        "deletes a file", "IsADirectoryError, or PermissionError",
        "let overwrite=True or keep= remove it, or use shutil.rmtree for directories",
    ),
    "remove-folders": Kind(
        "deletes directories of a listing", "the checkpoints are among them",
        "name the directories to delete, or pass over available_steps", CHECK,
    ),
    "copy": Kind(
        "copies a file", "IsADirectoryError", "shutil.copytree for directories; copy to a temporary name, then rename",
    ),
    "upload": Kind(
        "uploads or packs a file", "fails, or packs an empty directory",
        "upload the directory (add_dir, upload_folder), or save to s3:// or gs:// directly",
    ),
    "shell": Kind(
        "runs a shell command on a file", "fails, or skips directories",
        "add -r (cp, rm, scp, gsutil, rsync, zip) or --recursive (aws s3, azcopy); pack with tar",
    ),
    "open": Kind("opens a file", "IsADirectoryError", "restore_checkpoint(path, None) reads both formats"),
    "is-file": Kind("asks whether a path is a file", "False: it is a directory", "os.path.exists"),
    "size": Kind(
        "takes the size of a file", "the size of a directory's entry, about 4096",
        "iter_checkpoints gives sizes of both formats",
    ),
    "glob": Kind(
        "lists checkpoints", "also gives _gda folders and Orbax's temporaries; os.walk: among the directories",
        "available_steps or iter_checkpoints list complete checkpoints only", CHECK,
    ),
    "wrapped": Kind(
        "passes a checkpoint to another library", "depends on that library", "see whether it takes directories", CHECK
    ),
    "flag": Kind(
        "sets or reads the flag", "decides the format, at each call",
        "leave one place that sets it, and flip it there", CHECK,
    ),
    "relative-path": Kind(
        "saves to or restores from a relative path",
        "works, but to go back to Flax alone fails: it restores directories by absolute paths only",
        "os.path.abspath keeps the way back open", CHECK,
    ),
    "import": Kind(
        "imports the legacy API", "works as before",
        "import it from flax_ckpt_compat, or call flax_ckpt_compat.install()", NOTHING,
    ),
    "api": Kind("uses the legacy API", "works as before, on both formats", "", NOTHING),
}  # fmt: skip


class Finding(NamedTuple):
    """One line of code that saves, restores or handles checkpoints."""

    path: str  # File, as it was named or found
    cell: int | None  # Number of the notebook's code cell from 1; None in Python files
    line: int  # Line in the file or cell, from 1
    kind: str  # Key of `KINDS`
    action: str  # `CHANGE`, `CHECK` or `NOTHING`; `CHECK` where nothing says that the path is a checkpoint
    code: str  # The line, without its indentation
