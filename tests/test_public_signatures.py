"""What is public does not change unnoticed: the list of signatures in tests/data is the one of the code."""

from pathlib import Path

import pytest

from tests import public_signatures


def test_signatures_are_those_of_the_list() -> None:
    """A changed signature is announced in the changelog, without which the list is not written anew."""
    listed = public_signatures.FILE.read_text(encoding="utf-8").splitlines()
    found = public_signatures.public_signatures()
    changes = [f"- {line}" for line in listed if line not in found] + [
        f"+ {line}" for line in found if line not in listed
    ]
    assert not changes, "\n".join([*changes, "If this is meant: python -m tests.public_signatures"])


OLD = ["flax_ckpt_compat.restore(path: str) -> Any", "flax_ckpt_compat.Plan.why", "flax-ckpt ls --json"]


@pytest.mark.parametrize(
    ("new", "section", "missing"),
    [
        (OLD, "", []),
        ([OLD[0].replace("str", "int"), *OLD[1:]], "", ["flax_ckpt_compat.restore"]),
        ([OLD[0].replace("str", "int"), *OLD[1:]], "- `restore` takes numbers.", []),
        ([OLD[0].replace("str", "int"), *OLD[1:]], "- The restored files.", ["flax_ckpt_compat.restore"]),
        ([OLD[0].replace(")", ", how: str)"), *OLD[1:]], "- The argument `how`.", []),
        (OLD[1:], "", ["flax_ckpt_compat.restore"]),
        (OLD[:2], "- `Plan.why` is longer.", ["ls"]),
        ([*OLD, "flax_ckpt_compat.Plan.how"], "- `Plan.how` is new.", []),
    ],
)
def test_what_the_changelog_must_have(new: list[str], section: str, missing: list[str]) -> None:
    """Each changed, added or removed name stands in the section Unreleased; other releases do not count."""
    changelog = f"# Changelog\n## [Unreleased]\n{section}\n## [1.0.0]\n- `restore`, `ls`, `how`\n"
    assert public_signatures.unannounced(OLD, new, changelog) == missing


def test_the_list_is_kept_while_the_changelog_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command refuses, names what lacks a line, and leaves the list as it is."""
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    listed = tmp_path / "listed.txt"
    listed.write_text("flax_ckpt_compat.gone() -> None\n" + public_signatures.FILE.read_text(encoding="utf-8"))
    before = listed.read_text()
    monkeypatch.setattr(public_signatures, "ROOT", tmp_path)
    monkeypatch.setattr(public_signatures, "FILE", listed)
    with pytest.raises(SystemExit, match=r"says nothing of flax_ckpt_compat\.gone;"):
        public_signatures.main()
    assert listed.read_text() == before
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n- `gone` is gone.\n")
    public_signatures.main()
    assert listed.read_text() == before.partition("\n")[2]
