"""A database whose index is in a local directory while its values are in a store, in TensorStore's words."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from flax_ckpt_compat._core import paths, stores

_OF_PROCESSES = "ocdbt.process_"


def layered(local: str, url: str, inside: str = "") -> dict[str, Any]:
    """A directory that has the databases of single processes from a store, and all else on the local disk.

    Args:
        local: path of the directory that is to be uploaded.
        url: of the folder in the store.
        inside: name of a directory in it, instead of all.
    """
    stored = stores.spec(url)
    return {
        "driver": "kvstack",
        "layers": [
            {"base": paths.local_kvstore(f"{local}/")},
            {"base": {**stored, "path": stored["path"] + _OF_PROCESSES}, "prefix": _OF_PROCESSES},
        ],
        "path": inside and f"{inside}/",
    }


def locator(local: str, url: str) -> Callable[[str], str]:
    """Return what finds a file of that directory; see `layered`."""
    return lambda file: f"{url}/{file}" if file.startswith(_OF_PROCESSES) else os.path.join(local, file)
