from typing import NamedTuple


class Saved(NamedTuple):
    step: int
    path: str
    loss: float
