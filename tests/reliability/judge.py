"""Judge a directory after something went wrong: what restores, what is latest, whether the next save works."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

from tests.reliability.workloads import STEPS, Save, System


def judge(system: System, folder: str, before: STEPS, after: STEPS, *, acknowledged: bool, goes_on: bool) -> str:
    """Return what is wrong with a directory, in a sentence that begins with a word and a colon; empty if nothing is.

    Args:
        system: whose functions look.
        folder: the directory.
        before: steps before the save that was hit.
        after: steps after it.
        acknowledged: the save had returned, so that nothing but ``after`` is right.
        goes_on: also save the next step, and look at that.
    """
    with quiet():
        wrong = _wrong(system, folder, before, after, acknowledged=acknowledged)
        if not wrong and goes_on:
            wrong = _next_save(system, folder, max([*before, *after], default=0) + 1)
    return wrong


def _wrong(system: System, folder: str, before: STEPS, after: STEPS, *, acknowledged: bool) -> str:
    right = [after] if acknowledged else [before, after]
    latest = {steps[max(steps)] if steps else None for steps in right}
    try:
        restored = system.restore(folder)
    except Exception as error:
        return f"unreadable: {text_of(error)}"
    found = None if restored is None else system.number_of(restored)
    if restored is not None and found is None:
        return "half: the latest checkpoint restores to what was never saved"
    if found not in latest:
        return f"lost: the latest checkpoint holds {found}, expected {sorted(map(str, latest))}"
    try:
        listed = system.steps(folder) if os.path.isdir(folder) else []
    except Exception as error:
        return f"unreadable: the steps: {text_of(error)}"
    for step in listed:
        try:
            held = system.number_of(system.restore(folder, step))
        except Exception as error:
            return f"unreadable: step {step}: {text_of(error)}"
        if held is None:
            return f"half: step {step} restores to what was never saved"
        if step in (after if acknowledged else {}) and held != after[step]:
            return f"lost: step {step} holds {held}, expected {after[step]}"
    needed = set(after) if acknowledged else set(before) & set(after)
    if missing := sorted(needed - set(listed)):
        return f"lost: steps {missing} of {listed}"
    stayed = sorted(set(listed) - set(after).union(() if acknowledged else before))
    return f"kept: steps {stayed} of {listed}" if system.is_ours and stayed else ""


def _next_save(system: System, folder: str, step: int) -> str:
    number = 1_000 + step
    try:
        Save(step).run(system, folder, number)
        found = system.number_of(system.restore(folder))
    except Exception as error:
        return f"blocked: the next save: {text_of(error)}"
    return "" if found == number else f"blocked: after the next save, the latest checkpoint holds {found}"


def leftovers(folder: str) -> list[str]:
    """Return the temporaries of ours in a directory."""
    return [name for name in os.listdir(folder) if name.startswith(".")]


def text_of(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings about what is incomplete are right here, and many."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
