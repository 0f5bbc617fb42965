"""Define the kinds of findings of `flax-ckpt scan`, and their effects with ``flax_use_orbax_checkpointing``."""

from __future__ import annotations

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


_SAME = "works as before"

KINDS = {
    # Uses of the API.
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
    "flag": Kind(
        "sets or reads the flag", "decides the format", "decides the format, at each call",
        "leave one place that sets it, and flip it there", CHECK,
    ),
    "orbax-utils": Kind("uses flax.training.orbax_utils", "needs Orbax", "needs Flax's module and Orbax"),
    "transforms": Kind(
        "restores by Orbax's transformations", "deprecated in Orbax", "works for both formats",
        "rules=[…] of flax_ckpt_compat.restore say the same in one pattern",
    ),
    "untyped-restore": Kind(
        "restores without a target", "gives jax.Arrays instead of numpy arrays", "gives numpy arrays, as before",
    ),
    "relative-path": Kind(
        "saves to or restores from a relative path", "ValueError: Checkpoint path should be absolute",
        "works, but to go back to Flax alone fails: it restores directories by absolute paths only",
        "os.path.abspath keeps the way back open", CHECK,
    ),
    "process-guard": Kind(
        "saves in one process only", "waits for the other processes for ever",
        "saves in this process; arrays that it sees only in part need save_checkpoint_multiprocess",
    ),
    "caught-error": Kind(
        "catches errors of a restore", "a mismatch no longer raises: initial values are kept",
        "raises the same classes for both formats",
    ),
    # Code around it that expects one file.
    "remove": Kind(
        "deletes a checkpoint as a file", "IsADirectoryError, or PermissionError",
        "IsADirectoryError, or PermissionError",
        "let overwrite=True or keep= remove it, or use shutil.rmtree for directories", CHANGE,
    ),
    "copy": Kind(
        "copies a checkpoint as a file", "IsADirectoryError", "IsADirectoryError",
        "shutil.copytree for directories; copy to a temporary name, then rename", CHANGE,
    ),
    "shell-copy": Kind(
        "copies a checkpoint by a shell command", "directories are skipped without -r",
        "directories are skipped without -r",
        "add -r (cp, scp, gsutil, rsync, zip) or --recursive (aws s3, azcopy)", CHANGE,
    ),
    "shell-remove": Kind(
        "deletes a checkpoint by a shell command", "rm: Is a directory", "rm: Is a directory",
        "let overwrite=True or keep= remove it, or add -r", CHANGE,
    ),
    "remove-folders": Kind(
        "deletes the directories in a checkpoint directory", "deletes the checkpoints, too",
        "deletes the checkpoints, too", "name the directories to delete, or pass over available_steps", CHANGE,
    ),
    "file-names": Kind(
        "looks for checkpoints among the names of files", "finds none: they are among the names of directories",
        "finds none: they are among the names of directories", "available_steps, or iter_checkpoints", CHANGE,
    ),
    "upload": Kind(
        "uploads or packs a checkpoint as a file", "fails, or packs an empty directory",
        "fails, or packs an empty directory",
        "upload the directory (add_dir, upload_folder), or save to s3:// or gs:// directly", CHANGE,
    ),
    "open": Kind(
        "opens a checkpoint as a file", "IsADirectoryError", "IsADirectoryError",
        "restore_checkpoint(path, None) reads both formats", CHANGE,
    ),
    "is-file": Kind(
        "asks whether a checkpoint is a file", "False: it is a directory", "False: it is a directory",
        "os.path.exists, or latest_checkpoint", CHANGE,
    ),
    "only-files": Kind(
        "takes only the files of a checkpoint directory", "passes over the checkpoints",
        "passes over the checkpoints", "add those of available_steps, or iter_checkpoints", CHANGE,
    ),
    "size": Kind(
        "takes the size of a checkpoint file", "the size of a directory's entry, about 4096",
        "the size of a directory's entry, about 4096", "iter_checkpoints gives sizes of both formats", CHANGE,
    ),
    "glob": Kind(
        "lists checkpoints by a pattern", "also gives temporaries of Orbax, which are not checkpoints",
        "also gives _gda folders; temporaries have other names",
        "available_steps or iter_checkpoints list complete checkpoints only", CHECK,
    ),
    "parse-name": Kind(
        "reads the step from a checkpoint's name", "fails on temporaries, checkpoint_3.orbax-checkpoint-tmp-…",
        "works for names that latest_checkpoint returns", "available_steps gives the steps", CHECK,
    ),
    "wrapped": Kind(
        "passes a checkpoint to a function that was not scanned", "depends on that function",
        "depends on that function", "scan its code, too, or look whether it takes directories", CHECK,
    ),
    "poll": Kind(
        "waits until a checkpoint's name appears", "on object stores, the name is there before the arrays",
        "the name appears when all is written; on object stores, its marker does",
        "latest_checkpoint passes over what is incomplete", CHECK,
    ),
}  # fmt: skip

# Where a scan loses sight, so that "0 to change" does not hold for what comes after.
NOT_FOLLOWED = {
    "call": "passes a checkpoint to code that was not scanned",
    "path": "handles a file of which nothing is known",
}
