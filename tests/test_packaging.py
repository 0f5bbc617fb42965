"""What a wheel holds: every package folder, and only those."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    """Each folder with an __init__.py is in setup.cfg, which lists packages by hand."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = set(config["options"]["packages"].split())
    mapped = dict(line.split(" = ") for line in config["options"]["package_dir"].strip().splitlines())
    found = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for name, folder in mapped.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == listed


def test_no_module_lies_outside_a_package() -> None:
    """A folder with modules and without __init__.py would be left out of the wheel."""
    for folder in ("flax_ckpt_compat", "legacy", "orbax_backend"):
        for file in (ROOT / folder).rglob("*.py"):
            # Python imports sitecustomize by its name from a folder on its path; setup.cfg lists it for the wheel.
            assert (file.parent / "__init__.py").exists() or file.name == "sitecustomize.py", file
