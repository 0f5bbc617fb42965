"""The examples in public docstrings run, and every main function has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flax_ckpt_compat

MODULES = ("checkpoints", "config", "rules", "transforms")
# What the reference says every example begins with.
NAMES = {"np": np} | {name: getattr(flax_ckpt_compat, name) for name in flax_ckpt_compat.__all__}


def documented() -> dict[str, Any]:
    """Every public function and class, by its name in the package."""
    named = {name: NAMES[name] for name in flax_ckpt_compat.__all__}
    for module_name in MODULES:
        module = importlib.import_module(f"flax_ckpt_compat.{module_name}")
        named |= {f"{module_name}.{name}": getattr(module, name) for name in module.__all__}
    return {name: one for name, one in named.items() if inspect.isfunction(one) or inspect.isclass(one)}


EXAMPLES = {name: one for name, one in documented().items() if ">>> " in (one.__doc__ or "")}


def test_main_functions_have_examples() -> None:
    """The functions that the start page and the guide lead to show a call."""
    main = {"save", "restore", "plan_restore", "open_checkpoint", "iter_checkpoints", "verify", "diff", "convert"}
    flax = {"save_checkpoint", "restore_checkpoint", "latest_checkpoint", "available_steps"}
    assert main | {f"checkpoints.{name}" for name in flax} | {"installed", "config.override"} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.usefixtures("flag")
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example prints what it shows, with either value of Flax's flag."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    text: list[str] = []
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, dict(NAMES), name, None, None)
    runner.run(example, out=text.append)
    assert not runner.failures, "".join(text)
