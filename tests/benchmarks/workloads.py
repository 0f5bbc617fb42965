"""The trees that are saved and restored, and how their leaves are compared."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Nested dicts, or a TrainState.
Tree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """A tree of float32 arrays.

    Attributes:
        name: for ``--only`` and the tables.
        kind: ``large`` or ``small``; small ones run more rounds.
        title: what it is, for the tables.
        shapes: key path joined with ``/`` → shape.
        on_device: jax arrays; else numpy.
        adamw: the tree is a Flax TrainState after one step of Optax's adamw, with these arrays as its parameters.
        devices: over how many each matrix is split.
    """

    name: str
    kind: str
    title: str
    shapes: Mapping[str, tuple[int, ...]]
    on_device: bool = True
    adamw: bool = False
    devices: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        parameters = 4 * sum(math.prod(shape) for shape in self.shapes.values())
        return 3 * parameters + 8 if self.adamw else parameters

    @property
    def leaves(self) -> int:
        """How many arrays; adamw adds two moments of each, and two counters."""
        return 3 * len(self.shapes) + 2 if self.adamw else len(self.shapes)

    @property
    def summary(self) -> str:
        """One line for the tables."""
        kind = "jax" if self.on_device else "numpy"
        arrays = f"{self.leaves:,} {kind} array{'s' if self.leaves > 1 else ''}"
        return f"{self.title}: {arrays}, {self.nbytes / 1e6:,.1f} MB float32"

    def tree(self) -> Tree:
        """The tree to save: random numbers, which no compressor makes smaller by much, as in trained weights."""
        random = np.random.default_rng(0)
        tree = self._build(lambda shape: random.standard_normal(shape, np.float32))
        return _trained(tree) if self.adamw else tree

    def target(self, *, other_mesh: bool = False) -> Tree:
        """A tree to restore into: zeros, so that no value of it can pass for a restored one."""
        tree = self._build(lambda shape: np.zeros(shape, np.float32), other_mesh=other_mesh)
        return jax.tree.map(jax.numpy.zeros_like, _state(tree)) if self.adamw else tree

    def _build(self, make: Callable[[tuple[int, ...]], np.ndarray[Any, Any]], *, other_mesh: bool = False) -> Tree:
        tree: Tree = {}
        for path, shape in self.shapes.items():
            *parents, last = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            array = make(shape)
            # A copy: on the CPU jax would else share numpy's memory, as no array on a device does.
            where = self._sharding(shape, other_mesh=other_mesh)
            node[last] = jax.device_put(array, where, may_alias=False) if self.on_device else array
        return jax.block_until_ready(tree)

    def _sharding(self, shape: tuple[int, ...], *, other_mesh: bool) -> NamedSharding | None:
        """Matrices are split along both axes, all else is on every device."""
        if self.devices == 1:
            return None
        rows, columns = (2, self.devices // 2) if other_mesh else (self.devices // 2, 2)
        mesh = Mesh(np.array(jax.devices()[: self.devices]).reshape(rows, columns), ("x", "y"))
        return NamedSharding(mesh, PartitionSpec("x", "y") if len(shape) == 2 else PartitionSpec())


# One for all: a TrainState holds its optimizer, and two of them are equal only if that is the same.
_ADAMW = optax.adamw(1e-3)


def _state(parameters: Tree) -> TrainState:
    return TrainState.create(apply_fn=None, params=parameters, tx=_ADAMW)


def _trained(parameters: Tree) -> TrainState:
    """After a step, so that the moments are not zeros."""
    step = jax.jit(lambda state, gradients: state.apply_gradients(grads=gradients))
    return jax.block_until_ready(step(_state(parameters), parameters))


def gpt2_shapes(layers: int = 12, width: int = 768, vocabulary: int = 50257, positions: int = 1024) -> Any:
    """Names and shapes of GPT-2's parameters in Flax; by default those of GPT-2 small."""
    shapes: dict[str, tuple[int, ...]] = {
        "transformer/wte/embedding": (vocabulary, width),
        "transformer/wpe/embedding": (positions, width),
    }
    for layer in range(layers):
        at = f"transformer/h/{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{at}/{norm}/scale": (width,), f"{at}/{norm}/bias": (width,)}
        for dense, inputs, outputs in (
            ("attn/c_attn", width, 3 * width),
            ("attn/c_proj", width, width),
            ("mlp/c_fc", width, 4 * width),
            ("mlp/c_proj", 4 * width, width),
        ):
            shapes |= {f"{at}/{dense}/kernel": (inputs, outputs), f"{at}/{dense}/bias": (outputs,)}
    return shapes | {"transformer/ln_f/scale": (width,), "transformer/ln_f/bias": (width,)}


def leaf_shapes(count: int, elements: int = 130) -> Any:
    """Many small leaves, a hundred to a branch."""
    return {f"part_{index // 100:03}/leaf_{index % 100:02}": (elements,) for index in range(count)}


def workloads(*, quick: bool) -> list[Workload]:
    """All workloads; quick ones are for trying the program, their times mean nothing."""
    gpt2 = gpt2_shapes(2, 64, 500, 32) if quick else gpt2_shapes()
    leaves = leaf_shapes(40 if quick else 5000)
    title = "GPT-2 in small" if quick else "GPT-2 small"
    return [
        Workload("gpt2-jax", "large", title, gpt2),
        Workload("gpt2-numpy", "large", title, gpt2, on_device=False),
        Workload("gpt2+adamw", "large", f"{title} with adamw", gpt2, adamw=True),
        Workload("leaves-jax", "small", "Small leaves", leaves),
    ]
