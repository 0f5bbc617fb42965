"""Identify directories that are no checkpoints by the names in them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from flax_ckpt_compat._core import paths

_MAX_SHOWN = 3
_FLAX_FILE = "flax_model.msgpack"  # of Hugging Face's save_pretrained
_HUGGING_FACE = re.compile(
    r"flax_model(-\d+-of-\d+)?\.msgpack|pytorch_model.*\.bin|(model|adapter_model)(-\d+-of-\d+)?\.safetensors|"
    r"trainer_state\.json|diffusion_flax_model\.msgpack"
)
_KINDS = (
    (re.compile(r"saved_model\.pb(txt)?"), "a SavedModel of TensorFlow"),
    (re.compile(r".*\.data-\d{5}-of-\d{5}"), "a checkpoint of TensorFlow"),
    (re.compile(r".*\.distcp"), "a distributed checkpoint of PyTorch"),
    (re.compile(r".*\.(pt|pth|ckpt)"), "a folder of PyTorch checkpoints"),
    (re.compile(r"events\.out\.tfevents\..*"), "a folder of TensorBoard's events"),
)


def folder_looks_like(path: str) -> str:
    """Return what a directory that is no checkpoint looks like, or names some of what it holds."""
    names = sorted(paths.listdir(path))
    if "config.json" in names and any(map(_HUGGING_FACE.fullmatch, names)):
        return "a model folder of Hugging Face"
    for pattern, what in _KINDS:
        if any(map(pattern.fullmatch, names)):
            return what
    return f"a folder of something else (it holds {_some(names)})"


def msgpack_file_in(path: str) -> str | None:
    """Return the path of the only msgpack file in a directory, or of Hugging Face's; None if it is ambiguous."""
    names = [name for name in paths.listdir(path) if name.endswith(".msgpack")]
    name = _FLAX_FILE if _FLAX_FILE in names else names[0] if len(names) == 1 else None
    return None if name is None else os.path.join(path, name)


def foreign_remedy(path: str) -> str:
    """Return the remedy for a directory that is no checkpoint."""
    file = msgpack_file_in(path)
    if file is not None:
        return f"Restore the file in it: {file}."
    return "Restore another step or path, or read it with the program that wrote it."


def _some(names: Iterable[str]) -> str:
    shown = list(names)
    more = f", and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return ", ".join(shown[:_MAX_SHOWN]) + more
