"""List local directories."""

from __future__ import annotations

import os


def files_below(directory: str) -> list[str]:
    """Return the paths of all files below a local directory, relative to it."""
    return [
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, files in os.walk(directory)
        for name in files
    ]
