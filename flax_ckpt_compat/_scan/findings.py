"""Define the kinds of findings of `flax-ckpt scan`, and their effects with ``flax_use_orbax_checkpointing``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# What a finding asks for: a change of the code, a look at it, or nothing.
CHANGE, CHECK, NOTHING = "change", "check", "nothing"


class Kind(NamedTuple):
    """A kind of finding."""

    title: str  # What the code does
    flax: str  # What happens in Flax alone when the flag becomes true
    shim: str  # What happens with flax_ckpt_compat then
    remedy: str = ""  # What to do, or "" for nothing
    action: str = NOTHING  # `CHANGE`, `CHECK` or `NOTHING`, with flax_ckpt_compat


def _breaks(title: str, happens: str, remedy: str, action: str = CHANGE) -> Kind:
    """Return a kind of code that expects one file: the same happens with Flax alone and with flax_ckpt_compat."""
    return Kind(title, happens, happens, remedy, action)


_SAME = "works as before"

# In the order in which a person should look.
KINDS = {
    # Code that treats a checkpoint as one file.
    "remove": _breaks(
        "deletes a file", "IsADirectoryError, or PermissionError",
        "let overwrite=True or keep= remove it, or use shutil.rmtree for directories",
    ),
    "remove-folders": _breaks(
        "deletes directories of a listing", "the checkpoints are among them",
        "name the directories to delete, or pass over available_steps", CHECK,
    ),
    "copy": _breaks(
        "copies a file", "IsADirectoryError", "shutil.copytree for directories; copy to a temporary name, then rename",
    ),
    "upload": _breaks(
        "uploads or packs a file", "fails, or packs an empty directory",
        "upload the directory (add_dir, upload_folder), or save to s3:// or gs:// directly",
    ),
    "shell": _breaks(
        "runs a shell command on a file", "fails, or skips directories",
        "add -r (cp, rm, scp, gsutil, rsync, zip) or --recursive (aws s3, azcopy); pack with tar",
    ),
    "open": _breaks("opens a file", "IsADirectoryError", "restore_checkpoint(path, None) reads both formats"),
    "is-file": _breaks("asks whether a path is a file", "False: it is a directory", "os.path.exists"),
    "size": _breaks(
        "takes the size of a file", "the size of a directory's entry, about 4096",
        "iter_checkpoints gives sizes of both formats",
    ),
    "file-names": _breaks(
        "looks among the names of files", "checkpoints are among the names of directories",
        "available_steps, or iter_checkpoints",
    ),
    "glob": Kind(
        "lists checkpoints", "also gives temporaries of Orbax, which are not checkpoints",
        "also gives _gda folders; temporaries have other names",
        "available_steps or iter_checkpoints list complete checkpoints only", CHECK,
    ),
    "parse-name": Kind(
        "reads the step from a name", "fails on temporaries, checkpoint_3.orbax-checkpoint-tmp-…",
        "works for names that latest_checkpoint returns", "available_steps gives the steps", CHECK,
    ),
    "poll": Kind(
        "waits until a name appears", "on object stores, the name is there before the arrays",
        "the name appears when all is written; on object stores, its marker does",
        "latest_checkpoint passes over what is incomplete", CHECK,
    ),
    "wrapped": _breaks(
        "passes a checkpoint to another library", "depends on that library", "see whether it takes directories", CHECK
    ),
    # Uses of the API that need a look.
    "flag": Kind(
        "sets or reads the flag", "decides the format", "decides the format, at each call",
        "leave one place that sets it, and flip it there", CHECK,
    ),
    "relative-path": Kind(
        "saves to or restores from a relative path", "ValueError: Checkpoint path should be absolute",
        "works, but to go back to Flax alone fails: it restores directories by absolute paths only",
        "os.path.abspath keeps the way back open", CHECK,
    ),
    # Uses of the API that need nothing.
    "import": Kind(
        "imports the legacy API", "the module is deprecated", _SAME,
        "import it from flax_ckpt_compat, or call flax_ckpt_compat.install()",
    ),
    "save": Kind(
        "saves a checkpoint", "writes a directory; drops the save if the step is smaller than the newest",
        "writes a directory, with the rules of msgpack files",
    ),
    "multiprocess-save": Kind(
        "saves from several processes", "writes a directory; keep=N leaves N+1", "writes a directory; keep=N leaves N",
    ),
    "restore": Kind(
        "restores a checkpoint", "keeps initial values where names differ, without an error",
        "the same errors for both formats",
    ),
    "lookup": Kind("looks up checkpoints or steps", "also counts temporaries of Orbax", _SAME),
    "async-manager": Kind("saves in the background", "uses Orbax's own checkpointer instead", _SAME),
    "other-api": Kind("uses another name of the legacy API", "the module is deprecated", _SAME),
    "orbax-utils": Kind("uses flax.training.orbax_utils", "needs Orbax", "needs Flax's module and Orbax"),
    "transforms": Kind(
        "restores by Orbax's transformations", "deprecated in Orbax", "works for both formats",
        "rules=[…] of flax_ckpt_compat.restore say the same in one pattern",
    ),
    "untyped-restore": Kind(
        "restores without a target", "gives jax.Arrays instead of numpy arrays", "gives numpy arrays, as before",
    ),
    "process-guard": Kind(
        "saves in one process only", "waits for the other processes for ever",
        "saves in this process; arrays that it sees only in part need save_checkpoint_multiprocess",
    ),
    "caught-error": Kind(
        "catches errors of a restore", "a mismatch no longer raises: initial values are kept",
        "raises the same classes for both formats",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line of code that saves, restores or handles checkpoints."""

    path: str  # File, as it was named or found
    cell: int | None  # Number of the notebook's code cell from 1; None in Python files
    line: int  # Line in the file or cell, from 1
    kind: str  # Key of `KINDS`
    action: str  # `CHANGE`, `CHECK` or `NOTHING`; `CHECK` where nothing says that the path is a checkpoint
    code: str  # The line, without its indentation

    @property
    def about(self) -> Kind:
        """Return the description of the kind of finding."""
        return KINDS[self.kind]
