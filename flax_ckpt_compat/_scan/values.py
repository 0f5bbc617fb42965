"""Describe what an expression may hold: a checkpoint's path, an entry of a directory, known text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Kinds of tags.
CHECKPOINT = "checkpoint"  # its path or name, or a list of them
LINK = "link"  # the path of a symbolic link to one
RUN = "run"  # a directory that checkpoints are saved to
ENTRY = "entry"  # a name from the listing that `Tag.of` identifies; no test has told yet what it is
TEXT = "text"  # the text in `Tag.of`, with "{" for what is unknown
MENTION = "mention"  # text that contains a checkpoint's path, such as a shell command
OBJECT, FUNCTION = "object", "function"  # an instance of the class, or the function, whose node `Tag.of` identifies
LIBRARY = "library"  # what the function of the dotted name `Tag.of` returned

_MOST_TEXTS, _LONGEST_TEXT, _DEEPEST_INDEX, _MOST_TAGS = 6, 300, 3, 40


class Tag(NamedTuple):
    """One thing that an expression may hold."""

    kind: str
    of: int | str = 0
    place: tuple[int | str, ...] = ()  # where it is in tuples (0, 1, …) and dicts (a key, or `ANY_KEY`)
    piece: bool = False  # only a part of that name


Value = frozenset[Tag]
NOTHING: Value = frozenset()
_MANY = Tag("many")
ANY_KEY = "[]"
KEYS = "{}"  # the place of a dict's keys


def text(content: str) -> Value:
    """Return the value of text."""
    return frozenset([Tag(TEXT, content)]) if len(content) <= _LONGEST_TEXT else NOTHING


def texts(value: Value) -> list[str]:
    """Return the texts that a value may be."""
    return sorted(str(tag.of) for tag in value if tag.kind == TEXT and not tag.place)


def texts_of_elements(value: Value) -> list[str]:
    """Return the texts that the elements of a tuple, or the values of a dict, may be."""
    return sorted(str(tag.of) for tag in value if tag.kind == TEXT and len(tag.place) == 1)


def union(values: Iterable[Value]) -> Value:
    """Return what any of several values holds.

    It stays small, so that rounds end: of many texts only the first in their order; and where it may be very many
    things, as what a framework passes around, no functions, objects and elements at all, from then on."""
    joined: Value = frozenset().union(*values)
    if _MANY in joined or len(joined) > _MOST_TAGS:
        joined = frozenset(tag for tag in joined if not tag.place and tag.kind not in (FUNCTION, OBJECT)) | {_MANY}
    known = [tag for tag in joined if tag.kind == TEXT]
    if len(known) <= _MOST_TEXTS:
        return joined
    return joined - frozenset(sorted(known, key=str)[_MOST_TEXTS:])


def at_index(value: Value, index: int | str) -> Value:
    """Return the value as an element of a tuple or dict."""
    return frozenset(tag._replace(place=(index, *tag.place)[:_DEEPEST_INDEX]) for tag in value if tag != _MANY)


def element(value: Value, index: int | str) -> Value:
    """Return what an element of a tuple or dict holds; of a list, what any element does."""
    return frozenset(
        tag._replace(place=tag.place[1:]) for tag in value if not tag.place or tag.place[0] in (index, ANY_KEY)
    )


def of_sequence(value: Value, index: int | None) -> Value:
    """Return what an element of a list or tuple holds, of which the index may be unknown.

    A list holds what its elements do: dicts, whose keys tell, and tuples, unless the index tells that it is one."""
    whole = frozenset(tag for tag in value if tag.place and (index is None or isinstance(tag.place[0], str)))
    return whole | element(value, ANY_KEY if index is None else index)


def keys_of(value: Value) -> Value:
    """Return what the keys of a dict hold."""
    return frozenset(tag._replace(place=tag.place[1:]) for tag in value if tag.place and tag.place[0] == KEYS)


def of_table(value: Value) -> Value:
    """Return the functions that a dict may hold under a key that is not known."""
    return frozenset(
        tag._replace(place=tag.place[1:])
        for tag in value
        if tag.kind in (FUNCTION, LIBRARY) and tag.place and isinstance(tag.place[0], str)
    )


def dict_values(value: Value) -> Value:
    """Return what the values of a dict hold."""
    return frozenset(
        tag._replace(place=tag.place[1:]) if tag.place and isinstance(tag.place[0], str) else tag
        for tag in value
        if KEYS not in tag.place[:1]
    )


def pieces(value: Value) -> Value:
    """Return what is left of names that are cut or split."""
    kinds = (CHECKPOINT, LINK, ENTRY)
    return frozenset(tag._replace(piece=True) for tag in value if tag.kind in kinds and not tag.place)
