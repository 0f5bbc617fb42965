"""Handles of leaves that no file holds, for what only pairs a checkpoint's tree with a target."""

from typing import Any

import numpy as np

from flax_ckpt_compat._core.backend import LeafHandle, LeafKind
from flax_ckpt_compat._core.tree import Path, map_leaves, show_path
from flax_ckpt_compat._trees import state_dict


def handles(tree: Any) -> Any:
    """The neutral tree of a plain dict with a handle for every leaf but None."""

    def handle(path: Path, leaf: Any) -> Any:
        if leaf is None:
            return None
        array = np.asarray(leaf)
        kind = LeafKind.ARRAY if isinstance(leaf, np.ndarray) else LeafKind.INT
        reader: Any = None
        return LeafHandle(path, kind, array.shape, array.dtype, array.nbytes, show_path(path), reader, leaf)

    return map_leaves(handle, state_dict.describe(tree))
