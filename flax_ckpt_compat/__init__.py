"""flax.training.checkpoints, kept alive: msgpack and Orbax-format checkpoints behind Flax's own function names."""

from pathlib import Path as _Path

if not (_Path(__file__).parent / "legacy").is_dir():  # pragma: no branch
    # A checkout keeps the backends beside this folder; a wheel keeps them inside it.
    __path__.append(str(_Path(__file__).parents[1]))
