"""Decide which texts are names of checkpoints."""

from __future__ import annotations

import re

_DEFAULT = "checkpoint_"
_SHORTEST = 3  # letters of a prefix or name: shorter ones are found in too many texts
# After a prefix: a number, or what stands for one in format strings, globs and regular expressions.
_STEP = r"(?:\)?[-\d*%{\[.?(\\<$][^\s/]*)?"
_EXTENSION = re.compile(r"\\?\.[A-Za-z][\w-]*\$?$")


class CheckpointNames:
    """The names of a project's checkpoints: those of its prefixes, and of the copies that it makes."""

    def __init__(self) -> None:
        self._prefixes = {_DEFAULT}
        self.has_unknown_prefix = False  # one that begins with a variable, as f"{model}_"
        self._copies: dict[str, re.Pattern[str]] = {}
        self._links: dict[str, re.Pattern[str]] = {}
        self._pattern = self._compiled()

    def add_prefix(self, text: str) -> bool:
        """Take note of a prefix, up to what is unknown of it; return whether it is new."""
        prefix = re.split(r"[{%]", text, maxsplit=1)[0]
        if not prefix and text and not self.has_unknown_prefix:
            self.has_unknown_prefix = True
            return True
        if len(prefix) < _SHORTEST or prefix in self._prefixes:
            return False
        self._prefixes.add(prefix)
        self._pattern = self._compiled()
        return True

    def add_copy(self, text: str, *, is_link: bool = False) -> bool:
        """Take note of the path of a copy, or of a link; return whether it is new."""
        name = text.rpartition("/")[2]
        known = self._links if is_link else self._copies
        if name in known or len(name.replace("{", "")) < _SHORTEST or self._pattern.search(name):
            return False
        known[name] = re.compile(re.escape(name).replace(r"\{", ".+"))
        return True

    def has(self, text: str) -> bool:
        """Return whether text is the path, name or pattern of checkpoints."""
        if self._pattern.search(text):
            return not _EXTENSION.search(text)
        return self._is_of(self._copies, text)

    def may_be(self, text: str) -> bool:
        """Return whether a text may be a name of checkpoints: ``best_*`` may, with a prefix of code not scanned here.

        Of prefixes that begin with a variable, names that do may, unless they have an extension."""
        name = text.rpartition("/")[2]
        is_of_unknown = self.has_unknown_prefix and name.startswith("{") and not _EXTENSION.search(name)
        return name in ("", "{") or (name.endswith("*") and "." not in name) or is_of_unknown

    def has_link(self, text: str) -> bool:
        """Return whether text is the path of a link to a checkpoint."""
        return self._is_of(self._links, text)

    def has_part(self, text: str) -> bool:
        """Return whether text is a part of such names, as ``"checkpoint"``."""
        return len(text) >= _SHORTEST and any(text in name for name in (*self._prefixes, *self._copies))

    def is_in(self, text: str) -> bool:
        """Return whether text contains what such names begin with."""
        begins = (one.partition("{")[0] for one in (*self._prefixes, *self._copies, *self._links))
        return any(len(one) >= _SHORTEST and one in text for one in begins)

    def _compiled(self) -> re.Pattern[str]:
        begins = "|".join(re.escape(prefix) for prefix in sorted(self._prefixes))
        return re.compile(rf"(?:^|[/^*(])(?:{begins}){_STEP}$")

    def _is_of(self, known: dict[str, re.Pattern[str]], text: str) -> bool:
        name = text.rpartition("/")[2]
        return any(pattern.fullmatch(name) for pattern in known.values())
