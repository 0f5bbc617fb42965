"""The public surface of flax.training.checkpoints: same names, constants, signatures and helper functions."""

import inspect
import operator
import os
import re
import typing
from pathlib import Path
from typing import Any

import pytest
from flax import core
from flax.training import checkpoints as theirs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import restore, save
from flax_ckpt_compat.errors import StorageError
from tests.support.profiles import examples
from tests.support.saves import use_flag

REGEXES = [name for name in ours.__all__ if name.endswith("_RE")]
FUNCTIONS = [name for name in ours.__all__ if inspect.isroutine(getattr(ours, name)) or name == "AsyncManager"]
CONSTANTS = [name for name in ours.__all__ if name not in (*REGEXES, *FUNCTIONS)]
# Names, numbers and URLs as they occur, and characters that the patterns of Flax treat apart.
TEXTS = st.one_of(
    st.from_regex(r"[a-z_]{0,5}[-+]?\d{0,3}\.?\d{0,3}(e[-+]?\d)?[_/.a-z-]{0,4}\d{0,2}", fullmatch=True),
    st.from_regex(r"[a-z.+-]{0,5}:?/{0,3}[a-z./]{0,12}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text("0123456789.-+eE_a/:", max_size=12),
)


def test_every_public_name_is_there() -> None:
    """Functions, classes and types of Flax's module that are its own are in ours, which has no others."""
    own = (theirs.__name__, "typing")
    there = {name for name, value in vars(theirs).items() if getattr(value, "__module__", "") in own}
    public = {name for name in there if not name.startswith("_") and not hasattr(typing, name)}
    assert public <= set(ours.__all__) <= set(dir(theirs))
    assert (len(FUNCTIONS), len(REGEXES)) == (9, 4)


@pytest.mark.parametrize("name", [*FUNCTIONS, "AsyncManager.wait_previous_save", "AsyncManager.save_async"])
def test_signatures(name: str) -> None:
    """Names, order, kinds and defaults of all parameters are Flax's."""

    def shape(module: Any) -> list[Any]:
        parameters = inspect.signature(operator.attrgetter(name)(module)).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shape(ours) == shape(theirs)


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    """Constants have Flax's values."""
    assert getattr(ours, name) == getattr(theirs, name)


@settings(max_examples=examples(600), deadline=None)
@given(text=TEXTS)
@example(text="gs://bucket//a/../b/")
@example(text="/a/./b//")
@example(text="s3://x/\n")
@example(text="runs/1/checkpoint_-2.5e3")
@example(text="checkpoint_best")
@example(text="")
def test_texts(text: str) -> None:
    """Regular expressions match, search and split as Flax's do; paths are normalised and read as there.

    Evaluation scripts call Flax's ``_checkpoint_path_step``."""
    for name in REGEXES:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert isinstance(mine, re.Pattern) and mine.groupindex == other.groupindex
        for method in ("match", "fullmatch", "search"):
            found, expected = getattr(mine, method)(text), getattr(other, method)(text)
            assert (found and (found.span(), found.groups())) == (expected and (expected.span(), expected.groups()))
        assert mine.split(text) == other.split(text)
    assert ours.safe_normpath(text) == theirs.safe_normpath(text)
    assert ours._checkpoint_path_step(text) == theirs._checkpoint_path_step(text)


@settings(max_examples=examples(300), deadline=None)
@given(names=st.lists(TEXTS, max_size=6), signed=st.booleans())
@example(names=["c_1-2", "c_1-10", "c_1e5", "c_.5", "c_1.", "c_inf", "c_-3", "c_007", "c_7"], signed=True)
@example(names=["a_10", "a_9", "a_-1"], signed=False)
def test_natural_sort(names: list[str], signed: bool) -> None:
    """Names sort as Flax sorts them, or fail to compare as there."""
    try:
        expected = theirs.natural_sort(names, signed)
    except TypeError:
        with pytest.raises(TypeError):
            ours.natural_sort(names, signed)
    else:
        assert ours.natural_sort(names, signed) == expected


@pytest.mark.parametrize("name", ["_is_orbax_checkpoint", "_remove_invalid_ckpts", "config", "errors", "io", "logging"])
def test_other_names_of_flax(name: str) -> None:
    """Scripts use what Flax's module imports, and call its other helpers: these are Flax's own."""
    assert getattr(ours, name) is getattr(theirs, name)


def test_names_that_flax_has_not_either() -> None:
    """A misspelt name is an AttributeError of this module."""
    for name in ("save_checkpont", "__path__"):
        assert not hasattr(ours, name)
    with pytest.raises(AttributeError, match=r"'flax_ckpt_compat.checkpoints' has no attribute 'save_checkpont'"):
        ours.save_checkpont  # noqa: B018


def test_path_of_a_step() -> None:
    """They also call ``_checkpoint_path``, with numbers and with ``tmp``."""
    for arguments in ((".", 3), ("a/", "tmp", "x_"), ("s3://b", 2.5), ("", 1e20, "")):
        assert ours._checkpoint_path(*arguments) == theirs._checkpoint_path(*arguments)


def test_paths_of_all_checkpoints(tmp_path: Path) -> None:
    """``_all_checkpoints`` returns Flax's paths, without incomplete ones, and the latest step last."""
    assert ours._all_checkpoints(tmp_path) == theirs._all_checkpoints(tmp_path) == []
    assert ours._all_checkpoints(tmp_path / "absent") == []
    for step, orbax in ((-1, False), (2.5, False), (9, True), (10, False)):
        with use_flag(orbax):
            ours.save_checkpoint(tmp_path, {"a": 1}, step, keep=9)
    (tmp_path / "other_12").write_bytes(b"x")
    assert ours._all_checkpoints(tmp_path) == theirs._all_checkpoints(tmp_path)
    assert [path.rpartition("_")[2] for path in ours._all_checkpoints(tmp_path)] == ["-1", "2.5", "9", "10"]
    (tmp_path / "checkpoint_10").rename(tmp_path / "checkpoint_best")
    (tmp_path / "checkpoint_12").touch()  # cut off
    assert [path.rpartition("_")[2] for path in ours._all_checkpoints(tmp_path)] == ["best", "-1", "2.5", "9"]


MODULES = st.from_regex(r"(Conv|Dense|conv|Layer_1|x)(_\d{1,2})?", fullmatch=True)
PARAMS = st.recursive(
    st.integers(0, 9),
    lambda inner: st.one_of(
        st.dictionaries(MODULES, inner, max_size=5), st.dictionaries(MODULES, inner, max_size=3).map(core.freeze)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(200), deadline=None)
@given(params=PARAMS)
@example(params={"Conv_0": 1, "Dense_1": 2, "Conv_10": 3, "Conv_2": {"Dense_3": 4}})
def test_convert_pre_linen(params: Any) -> None:
    """Modules are renamed as Flax renames them, in the same order and containers."""
    mine, other = ours.convert_pre_linen(params), theirs.convert_pre_linen(params)
    assert mine == other and repr(mine) == repr(other)


URLS = ["hdfs://host/dir", "ftp://host", "s3:/bucket/dir", "gs:///dir", Path("s3://bucket/dir"), Path("gs://bucket")]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("step", [1, None])
def test_urls_that_lead_nowhere_are_refused_clearly(url: Any, step: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """No known scheme, no bucket, or a slash too few: an error that says so, not a folder called gs:."""
    monkeypatch.chdir(tmp_path)
    told = "the scheme '.*://' is unknown" if str(url).startswith(("hdfs", "ftp")) else "s3://|pathlib|bucket"
    for call in (
        lambda: ours.save_checkpoint(url, {"a": 1}, 1),
        lambda: ours.restore_checkpoint(url, None, step),
        lambda: ours.latest_checkpoint(url),
        lambda: save(url, {"a": 1}, step=step),
        lambda: restore(url, step=step),
    ):
        with pytest.raises(StorageError, match=told):
            call()
    assert os.listdir(tmp_path) == []
