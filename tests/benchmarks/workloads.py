"""The trees that are saved and restored, and how their leaves are compared."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A tree of float32 arrays.

    Attributes:
        name: for ``--only`` and the tables.
        kind: ``large`` or ``small``; goals differ.
        title: what it is, for the tables.
        shapes: key path joined with ``/`` → shape.
        on_device: jax arrays; else numpy.
    """

    name: str
    kind: str
    title: str
    shapes: Mapping[str, tuple[int, ...]]
    on_device: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return 4 * sum(int(np.prod(shape)) for shape in self.shapes.values())

    @property
    def summary(self) -> str:
        """One line for the tables."""
        kind = "jax" if self.on_device else "numpy"
        return f"{self.title}: {len(self.shapes)} {kind} arrays, {self.nbytes / 1e6:.1f} MB float32"

    def tree(self) -> Tree:
        """The tree to save: random numbers, which no compressor makes smaller by much, as in trained weights."""
        random = np.random.default_rng(0)
        return self._build(lambda shape: random.standard_normal(shape, np.float32))

    def target(self) -> Tree:
        """A tree to restore into: zeros, so that no value of it can pass for a restored one."""
        return self._build(lambda shape: np.zeros(shape, np.float32))

    def _build(self, make: Callable[[tuple[int, ...]], np.ndarray[Any, Any]]) -> Tree:
        tree: Tree = {}
        for path, shape in self.shapes.items():
            *parents, last = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            array = make(shape)
            # A copy: on the CPU jax would else share numpy's memory, as no array on a device does.
            node[last] = jax.device_put(array, may_alias=False) if self.on_device else array
        return jax.block_until_ready(tree)


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
        Workload("gpt2-jax", "large", title, gpt2, True),
        Workload("gpt2-numpy", "large", title, gpt2, False),
        Workload("leaves-jax", "small", "Small leaves", leaves, True),
        Workload("leaves-numpy", "small", "Small leaves", leaves, False),
    ]


def assert_same(restored: Any, saved: Tree, what: str) -> None:
    """Compares every leaf bit by bit.

    Raises:
        AssertionError: another structure, dtype, shape or byte.
    """
    paths, saved_leaves = _leaves(saved)
    restored_paths, restored_leaves = _leaves(restored)
    assert paths == restored_paths, f"{what}: the leaves have other names"
    for path, old, new in zip(paths, saved_leaves, restored_leaves, strict=True):
        same = old.dtype == new.dtype and old.shape == new.shape and np.array_equal(_bits(old), _bits(new))
        assert same, f"{what}: {path} differs from what was saved"


def _bits(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array).reshape(-1).view(np.uint8)


def _leaves(tree: Any) -> tuple[list[str], list[Any]]:
    entries, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in entries], [leaf for _, leaf in entries]
