"""Settings: where they come from, how far they reach, and what they refuse."""

import threading
from pathlib import Path
from typing import Any

import flax
import numpy as np
import pytest

from flax_ckpt_compat import checkpoints, config
from flax_ckpt_compat.errors import ArgumentError, SettingError
from tests.support.saves import start_python, use_flag

pytestmark = pytest.mark.usefixtures("nothing_set")
PRINT = "from flax_ckpt_compat import config; print(config.current())"


def test_defaults_are_those_of_the_table() -> None:
    """The first value of each row of the module's table is the default."""
    rows = [line for line in (config.__doc__ or "").splitlines() if line.startswith("``") and "  " in line]
    table = {row.split("``")[1]: row.split("``")[2].split()[0].strip(",") for row in rows}
    assert set(table) == set(config.Settings.__slots__)
    for name, value in table.items():
        assert str(getattr(config.Settings(), name)).lower() == value


def test_override_reaches_its_block_only() -> None:
    """A setting holds inside the block, nests, and is as before after it, also after an error."""
    with config.override(missing_leaves="ignore") as settings:
        assert settings.missing_leaves == config.current().missing_leaves == "ignore"
        with config.override(dtype="target"):
            assert (config.current().missing_leaves, config.current().dtype) == ("ignore", "target")
            config.update(structure="stored")  # what a block leaves alone follows the process
            assert config.current().structure == "stored"
        assert config.current().dtype == "stored"
    config.update(structure="flax")
    with pytest.raises(RuntimeError), config.override(must_exist=True):
        raise RuntimeError
    assert config.current() == config.Settings()


def test_other_threads() -> None:
    """They see what update sets for the process, and nothing of a block, be it of other defaults, here."""
    config.update(missing_leaves="warn")
    seen: list[config.Settings] = []
    with config.override(dtype="target", missing_leaves="ignore"), config.defaults(config.STRICT):
        thread = threading.Thread(target=lambda: seen.append(config.current()))
        thread.start()
        thread.join()
        assert (config.dtype, config.missing_leaves, config.structure) == ("target", "ignore", "stored")
    assert seen == [config.current()] == [config.Settings(missing_leaves="warn")]


def test_what_was_set_stands_over_other_defaults() -> None:
    """defaults gives values to what nobody set, in its block only; a setting counts also where it says the default."""
    with config.defaults(config.STRICT) as settings:
        assert settings == config.current() == config.STRICT
        strict = config.Settings(shape_mismatch="error", kind_mismatch="error", structure="stored", must_exist=True)
        assert strict == config.STRICT
        with config.override(structure="flax", must_exist=False):
            assert config.current() == config.Settings(shape_mismatch="error", kind_mismatch="error")
        config.update(shape_mismatch="warn")
        assert config.current() == config.Settings(kind_mismatch="error", structure="stored", must_exist=True)
        with config.override(shape_mismatch="error"):
            assert config.current() == config.STRICT
    assert config.current() == config.Settings()
    with config.override(must_exist=True), config.defaults(config.Settings(dtype="target", must_exist=False)):
        assert config.current() == config.Settings(dtype="target", must_exist=True)


NEVER_NONE = {*config.Settings.__slots__} - {"compression", "progress"}
NO_SECONDS = (True, False, 0, -1.0, np.inf, np.nan, "3")  # one second would end every save of several processes
UPDATES: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    *(((), {name: None}, f"{name} takes") for name in sorted(NEVER_NONE)),
    *(((), {"coordination_timeout": value}, "a positive number of seconds") for value in NO_SECONDS),
    ((), {"missing_leaves": "kepe"}, "missing_leaves takes "),
    ((), {"must_exist": "yes"}, "must_exist takes "),
    ((), {"missing_leave": "ignore"}, "the settings are .*missing_leaves"),
    ((), {"must_exists": True}, r"did you mean 'must_exist'\?"),
    (("must_exits", True), {}, r"did you mean 'must_exist'\?"),
    *(
        (words, {}, "a setting's name and its value")
        for words in (("must_exist",), ("dtype", True, 1), (True, "dtype"))
    ),
]


@pytest.mark.parametrize(("words", "changes", "told"), UPDATES)
def test_mistakes_are_refused(words: tuple[Any, ...], changes: dict[str, Any], told: str) -> None:
    """An unknown setting or value is an error that lists what there is, and changes nothing."""
    with pytest.raises(SettingError, match=told):
        config.update(*words, **changes)
    if changes:
        with pytest.raises(SettingError, match=told), config.override(**changes):
            pass
    assert config.current() == config.Settings()


@pytest.mark.parametrize(("name", "value"), [("must_exist", True), ("compression", "zstd"), ("compression", None)])
def test_update_as_flax_spells_it(name: str, value: object) -> None:
    """update takes a name and a value, too, as Flax's own config.update does; None is a value of compression."""
    config.update(name, value)
    with config.defaults(config.Settings(compression="zstd")):
        assert getattr(config, name) is value


def test_the_environment() -> None:
    """Environment variables set the process's defaults, in any case; what is empty or unknown has no effect.

    An unknown one is logged with the nearest name."""
    variables = {"MISSING_LEAVES": " Ignore ", "MUST_EXIST": "1", "COMPRESSION": "none", "CHECKSUMS": "off"}
    more = {"MAPPED": "False", "DTYPE": "", "STRUCTURE": " ", "MISSING_LEAFS": "keep", "OF_SOMETHING_ELSE": "1"}
    process = start_python(PRINT, **{f"FLAX_CKPT_COMPAT_{name}": text for name, text in (variables | more).items()})
    out, err = process.communicate(timeout=60)
    expected = config.Settings(missing_leaves="ignore", must_exist=True, compression=None, checksums="off")
    assert (process.returncode, out.strip()) == (0, repr(expected))
    mistyped, foreign = err.strip().splitlines()
    assert "FLAX_CKPT_COMPAT_MISSING_LEAFS" in mistyped
    assert "did you mean 'missing_leaves'?" in mistyped
    assert "FLAX_CKPT_COMPAT_OF_SOMETHING_ELSE" in foreign and "dtype" in foreign


def test_a_mistake_in_the_environment() -> None:
    """A wrong value in the environment is an error that names variable and setting, not a silent default."""
    process = start_python(PRINT, FLAX_CKPT_COMPAT_DTYPE="bf16")
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    message = "environment variable FLAX_CKPT_COMPAT_DTYPE: setting dtype takes 'stored', 'target'; found 'bf16'"
    assert err.rstrip().endswith(message)


@pytest.mark.parametrize("name", config.Settings.__slots__)
def test_settings_are_attributes(name: str) -> None:
    """config.NAME is the value in force; assigning to it, or to a mistyped name, is refused, with what works."""
    assert getattr(config, name) == getattr(config.Settings(), name)
    with config.override(must_exist=True):
        assert config.must_exist is True
    with pytest.raises(SettingError, match=rf"config\.update\({name}=True\)"):
        setattr(config, name, True)
    with pytest.raises(SettingError, match=f"there is no setting '{name}s'.*{name}"):
        setattr(config, f"{name}s", True)
    assert config.current() == config.Settings()
    assert not hasattr(config, f"{name}s")


def test_flax_flag_is_read_afresh() -> None:
    """Flax's flag counts as it is at each call."""
    for value in (True, False, True):
        with use_flag(value):
            assert config.use_orbax_format() is value is bool(flax.config.flax_use_orbax_checkpointing)


@pytest.mark.parametrize("text", ["false", "True", ""])
def test_a_flag_that_is_text_is_refused(text: str, tmp_path: Path) -> None:
    """``bool("false")`` is True, so a save would write the other format."""
    with use_flag(text), pytest.raises(ArgumentError, match="flax_use_orbax_checkpointing must be True or False"):
        checkpoints.save_checkpoint(tmp_path, {"a": 1}, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_flag_in_the_environment_alone(monkeypatch):
    """A later Flax without the flag: its variable still decides, and is refused where it says neither."""
    monkeypatch.setattr(flax, "config", None)
    for value, expected in (("ON", True), ("f", False)):
        monkeypatch.setenv("FLAX_USE_ORBAX_CHECKPOINTING", value)
        assert config.use_orbax_format() is expected
    monkeypatch.setenv("FLAX_USE_ORBAX_CHECKPOINTING", "perhaps")
    with pytest.raises(SettingError, match="FLAX_USE_ORBAX_CHECKPOINTING is 'perhaps'"):
        config.use_orbax_format()
