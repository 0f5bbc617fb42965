"""The pairs of releases, with what they were used with at their time: later packages break them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Release:
    """A release of Flax and of Orbax.

    Attributes:
        flax, orbax: versions.
        jax: version of jax and jaxlib.
        python: version of Python.
        others: requirements for the rest.
    """

    flax: str
    orbax: str
    jax: str
    python: str
    others: str = ""

    @property
    def requirements(self) -> list[str]:
        """What pip installs."""
        pinned = {"flax": self.flax, "orbax-checkpoint": self.orbax, "jax": self.jax, "jaxlib": self.jax}
        return [f"{name}=={version}" for name, version in pinned.items()] + self.others.split()


_2023 = "scipy<1.12 chex<0.1.85 etils<1.7 optax==0.1.7"
_2024 = "numpy<2 scipy<1.13 chex<0.1.87 etils<1.9 optax==0.2.2"
_ALL = [
    Release("0.7.0", "0.2.7", "0.4.13", "3.10", f"tensorstore==0.1.40 numpy==1.25.2 ml-dtypes==0.2.0 {_2023}"),
    Release("0.7.2", "0.3.5", "0.4.18", "3.10", f"tensorstore==0.1.45 numpy==1.26.4 ml-dtypes==0.3.1 {_2023}"),
    Release("0.7.4", "0.4.1", "0.4.18", "3.10", f"tensorstore==0.1.46 numpy==1.26.4 ml-dtypes==0.3.1 {_2023}"),
    Release("0.7.5", "0.4.4", "0.4.23", "3.10", f"tensorstore==0.1.56 ml-dtypes==0.4.0 {_2024}"),
    Release("0.8.2", "0.5.7", "0.4.25", "3.10", f"tensorstore==0.1.56 ml-dtypes==0.4.0 {_2024}"),
    Release("0.8.4", "0.5.15", "0.4.28", "3.10", f"tensorstore==0.1.60 ml-dtypes==0.4.0 {_2024}"),
    Release("0.9.0", "0.6.4", "0.4.33", "3.11", "tensorstore==0.1.66 numpy==2.1.2 ml-dtypes==0.5.0 chex<0.1.88"),
    Release("0.10.2", "0.10.3", "0.4.38", "3.11", "tensorstore==0.1.71 numpy==2.2.2 ml-dtypes==0.5.1 chex<0.1.89"),
    Release("0.10.6", "0.11.16", "0.6.2", "3.11", "tensorstore==0.1.75 numpy==2.3.1 ml-dtypes==0.5.1"),
    Release("0.12.1", "0.11.30", "0.8.1", "3.11", "tensorstore==0.1.80 numpy==2.3.5 ml-dtypes==0.5.4"),
    Release("0.12.8", "0.12.8", "0.10.2", "3.11", "tensorstore==0.1.86"),
]
RELEASES = {f"{one.flax}+{one.orbax}": one for one in _ALL}
