"""Install flax_ckpt_compat in every Python that has this folder on PYTHONPATH, then run the user's own sitecustomize.

Any release of Python imports this before any program, so nothing else is imported until one imports Flax's module."""

from __future__ import annotations

import importlib
import os
import sys

_FOLDER = os.path.dirname(__file__)
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER)))


class _Finder:
    """Import finder that installs the shim, in its own place, at the first import from ``flax.training``."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname not in ("flax.training", "flax.training.checkpoints") or cls not in sys.meta_path:
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not cls]
        if "site-packages" not in _ROOT and _ROOT not in sys.path:  # a checkout that is not installed
            sys.path.append(_ROOT)
        try:
            from flax_ckpt_compat import _patching
        except ImportError as error:
            import logging

            logging.getLogger("flax_ckpt_compat").warning("Flax's checkpoints are not replaced: %s", error)
            return None
        _patching.install_on_import()
        return _patching.FINDER.find_spec(fullname, path, target)


sys.meta_path.insert(0, _Finder)
sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
del sys.modules["sitecustomize"]
importlib.import_module("sitecustomize")  # the next one; Python ignores the error if there is none
