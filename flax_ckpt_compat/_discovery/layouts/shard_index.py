"""Read the index of a model of Hugging Face in several files: which file holds each tensor."""

from __future__ import annotations

import json

from flax_ckpt_compat._core.errors import IncompleteCheckpointError
from flax_ckpt_compat._core.local.safe_open import stays_inside
from flax_ckpt_compat._core.location import Location
from flax_ckpt_compat._discovery.layouts.layout import damaged

_MAX_BYTES = 100_000_000  # as of a header of safetensors
_DECODE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def files_of(index: Location, suffix: str) -> list[Location]:
    """Return the files that an index names, which lie beside it and end in a suffix; raise if one is missing."""
    try:
        text = index.read(0, _MAX_BYTES)
        names = sorted(set(json.loads(text)["weight_map"].values()))
        bad = [name for name in names if not name.endswith(suffix) or not stays_inside(name)]
    except _DECODE_ERRORS as error:
        raise damaged(index, f"it is not an index of {suffix} files ({error!r:.200})") from error
    if bad:
        raise damaged(index, f"it names {bad[0]!r:.100}, which is not a {suffix} file beside it")
    files = [index.parent / name for name in names]
    if lost := [file.name for file in files if not file.isfile()]:
        raise IncompleteCheckpointError(
            f"{index}: {len(lost)} of {len(files)} shards are missing, such as {lost[0]}; copy them beside it, or "
            "download them again",
            path=index.path,
        )
    return files
