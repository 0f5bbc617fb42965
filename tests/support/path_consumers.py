"""Ask everything that decides what lies at a path about rows of ``tests/data/path_kinds.toml``; judge the answers."""

import dataclasses
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, errors
from flax_ckpt_compat.cli import main
from tests.support import path_kinds
from tests.support.path_kinds import Builder, Row
from tests.support.store_places import AnyBucket

NEW = {"w": np.full(2, 7, np.float32)}
KEEP_ALL = 99


class Look:
    """A row in directories of its own: beside the older step, and alone.

    Attributes:
        folder: a local folder; those of checkpoints are in it, or in a bucket.
        root: path or URL of all its directories.
        run, alone: of the directory with the older step, and that without.
        path: of the row in ``run``.
        texts: the errors that were raised, by consumer.
    """

    def __init__(self, builder: Builder, row: Row, folder: Path, bucket: AnyBucket | None = None):
        if bucket is not None:
            row = dataclasses.replace(row, columns=row.columns | row["in_store"])
        self.builder, self.row, self.folder, self.bucket = builder, row, folder, bucket
        builder.put(row, folder / "alone")
        builder.put(row, folder / "run")
        builder.put_older(row, folder / "run")
        self.root = str(folder) if bucket is None else bucket.url
        self.run, self.alone = f"{self.root}/run", f"{self.root}/alone"
        self.path = f"{self.run}/{row.at}"
        self.texts: dict[str, str] = {}
        if bucket is not None:
            for name in ("alone", "run"):
                bucket.upload(folder / name, name)
                self.mark(name)

    def mark(self, name: str) -> None:
        """Add the objects by which a save to a store says that it is under way."""
        now = int(time.time())
        for marker in self.row["markers"]:
            assert self.bucket is not None
            self.bucket.put(f"{name}/{self.row.at}/{marker.format(now=now, yesterday=now - 25 * 3600)}", b"")

    def copied(self, name: str) -> str:
        """Another directory like ``run``."""
        if self.bucket is None:
            shutil.copytree(self.run, self.folder / name, symlinks=True)
        else:
            self.bucket.upload(self.folder / "run", name)
            self.mark(name)
        return f"{self.root}/{name}"

    def digest(self, place: str, name: str) -> Any:
        """What is equal only if all of a name is; None if it is not there."""
        if self.bucket is None:
            return path_kinds.digest(Path(place, name))
        beginning = f"{place.removeprefix(self.root + '/')}/{name}"
        keys = [key for key in self.bucket.keys(beginning) if key == beginning or key.startswith(beginning + "/")]
        # Markers have the time in their names.
        return {re.sub(r"\d{10}", "", key[len(beginning) :]): self.bucket.get(key) for key in keys} or None

    def value(self, consumer: str, call: Callable[[], Any]) -> str:
        """What a call restores in a word, or the class of its error."""
        try:
            return self.builder.what_it_is(self.row, call())
        except Exception as error:
            self.texts[consumer] = str(error)
            return type(error).__name__

    def opens(self, consumer: str, call: Callable[[], Any], word: str = "opens") -> str:
        """A word if a call does not raise, or the class of its error."""
        try:
            call()
        except Exception as error:
            self.texts[consumer] = str(error)
            return type(error).__name__
        return word

    def command(self, consumer: str, *arguments: Any) -> Result:
        """Runs a command, which fails only with an error of its own."""
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
        if result.exit_code:
            self.texts[consumer] = result.output
        return result


def look_ups(look: Look) -> dict[str, Any]:
    """What the functions of Flax and ours find, beside the older step and alone."""
    row, run, alone, prefix = look.row, look.run, look.alone, look.row.prefix
    found: dict[str, Any] = {}
    latest = checkpoints.latest_checkpoint(run, prefix)
    found["latest_checkpoint"] = latest and os.path.basename(latest)
    found["available_steps"] = checkpoints.available_steps(run, prefix)
    old, new = checkpoints.restore_checkpoint, flax_ckpt_compat.restore
    calls: dict[str, Callable[[], Any]] = {
        "restore_checkpoint, path": lambda: old(look.path, None),
        "restore, path": lambda: new(look.path),
        "restore_checkpoint, latest": lambda: old(run, None, prefix=prefix),
        "restore, latest": lambda: new(run, prefix=prefix),
        "restore_checkpoint, alone": lambda: old(alone, None, prefix=prefix),
        "restore, alone": lambda: new(alone, prefix=prefix),
    }
    if row.at == f"{prefix}6":
        calls["restore_checkpoint, step"] = lambda: old(run, None, 6, prefix)
        calls["restore, step"] = lambda: new(run, step=6, prefix=prefix)
    if row["in_manager"]:
        calls["restore_checkpoint, root"] = lambda: old(run, None)
        calls["restore, root"] = lambda: new(run)
    return found | {consumer: look.value(consumer, call) for consumer, call in calls.items()}


def views(look: Look) -> dict[str, Any]:
    """What the functions that look without restoring say, and the commands."""
    row, run, path, prefix = look.row, look.run, look.path, look.row.prefix
    found: dict[str, Any] = {
        "plan_restore, path": look.opens("plan_restore, path", lambda: flax_ckpt_compat.plan_restore(path)),
        "open_checkpoint": look.opens("open_checkpoint", lambda: flax_ckpt_compat.open_checkpoint(path).close()),
    }
    try:
        found["plan_restore, latest"] = os.path.basename(flax_ckpt_compat.plan_restore(run, prefix=prefix).path or "")
    except errors.CheckpointError as error:
        found["plan_restore, latest"] = type(error).__name__
    listed = json.loads(look.command("ls", "ls", run, "--json", "--prefix", prefix).stdout)
    kinds = [
        one["kind"] if one["kind"] != "checkpoint" else "complete" if one["complete"] else "incomplete"
        for one in listed
        if os.path.basename(one["path"]) == row.at
    ]
    found["ls"] = kinds[0] if len(kinds) == 1 else kinds or "nothing"
    found["show"] = look.command("show", "show", path).exit_code
    found["verify, path"] = look.command("verify, path", "verify", path).exit_code
    found["diff"] = look.command("diff", "diff", path, path).exit_code
    verified = json.loads(look.command("verify, directory", "verify", run, "--json").stdout)
    states = {one["path"].removeprefix(f"{run}/"): one["state"] for one in verified[0]["checkpoints"]}
    state = states.get(row.at, "not listed")
    found["verify, directory"] = "ok" if state == "unverified" else state
    left = json.loads(look.command("clean", "clean", run, "--dry-run", "--json").stdout)
    names = [one["path"].removeprefix(f"{run}/") for one in left]
    found["clean lists"] = sorted({row.at if name == row.at else name for name in names})
    return found


def conversions(look: Look) -> dict[str, Any]:
    """What ``convert`` makes of it: its exit code, and what the result restores."""
    to = look.folder / "converted"
    code = look.command("convert", "convert", look.path, to, "--to", "orbax").exit_code
    found: dict[str, Any] = {"convert": min(code, 1)}
    if code == 0:
        found["converted"] = look.value("converted", lambda: flax_ckpt_compat.restore(to))
        if text := look.row["also_converted"]:
            files = [file.read_bytes() for file in to.rglob("*") if file.is_file()]
            found["converted, beside the tree"] = any(text.encode() in content for content in files)
    return found


def changes(look: Look) -> dict[str, Any]:
    """What saves leave of it and of the older step, in copies of the directory."""
    row, prefix = look.row, look.row.prefix
    before, found = look.digest(look.run, row.at), dict[str, Any]()

    def save(consumer: str, place: str, step: float, **options: Any) -> str:
        call = lambda: checkpoints.save_checkpoint(place, NEW, step, prefix, **options)  # noqa: E731
        return look.opens(consumer, call, "saved")

    def left(place: str) -> list[str]:
        now = look.digest(place, row.at)
        word = [] if now is None else ["row"] if now == before else ["row, changed"]
        names = [str(step) for step in (4, 5, 7) if look.digest(place, f"{prefix}{step}") is not None]
        return sorted([*names, *word])

    for consumer, step, options in (
        ("keep=1", 7, {"keep": 1}),
        ("keep=2", 7, {"keep": 2}),
        ("overwrite at 4", 4, {"keep": KEEP_ALL, "overwrite": True}),
    ):
        place = look.copied(re.sub(r"\W", "_", consumer))
        outcome = save(consumer, place, step, **options)
        found[consumer] = [*left(place), *([outcome] if outcome != "saved" else [])]
    place = look.copied("others")
    found["save at 5.5"] = save("save at 5.5", place, 5.5, keep=KEEP_ALL)
    found["after 5.5"] = left(place)
    found["overwrite at 6"] = save("overwrite at 6", place, 6, keep=KEEP_ALL, overwrite=True)
    found["after overwrite"] = left(place)
    if look.bucket is None:
        place = look.copied("refused")
        found["save at 6"] = save("save at 6", place, 6, keep=KEEP_ALL)
        found["after save"] = left(place)
        place = look.copied("only_checkpoints")
        overwrite = functools.partial(flax_ckpt_compat.save, f"{place}/{row.at}", NEW, overwrite=True)
        found["save()"] = look.opens("save()", overwrite, "saved")
        found["after save()"] = left(place)
    return found


def settled(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """The columns; what the rules leave open is settled by the first answer, which all others must follow."""
    columns = dict(row.columns)
    for name in ("restores", "alone"):
        columns[name] = columns[name] if isinstance(columns[name], list) else [columns[name]]
    first = found.get("restore_checkpoint, step", found["restore_checkpoint, path"])
    if agrees(first, columns["restores"]) and columns["kind"] != "absent":
        columns["restores"] = [first]
    if columns["latest_beside_older"] == "any":
        is_latest = found["latest_checkpoint"] == row.at
        kind = (
            "foreign"
            if columns["restores"] == ["UnrecognizedFormatError"]
            else "damaged"
            if is_latest
            else "incomplete"
        )
        like = path_kinds.kinds()[kind]
        for name in ("latest_beside_older", "is_step", "counts_for_keep", "may_be_removed", "blocks_lower_step"):
            columns[name] = like[name] if columns[name] == "any" else columns[name]
        columns["ls"] = like["ls"]
        if kind == "foreign":
            columns |= {"verifies": [1, 2], "verified_as": ["damaged", "not listed"]}
    if columns["may_be_removed"] == "both or none":
        columns["may_be_removed"] = ["keep", "overwrite"] if found["overwrite at 6"] == "saved" else []
    return columns


def expected(row: Row, found: dict[str, Any]) -> dict[str, list[Any] | None]:
    """Consumer → the alternatives of what must hold, from the columns; None: anything."""
    columns = settled(row, found)
    values, is_latest, removed = columns["restores"], columns["latest_beside_older"], columns["may_be_removed"]
    at, older = row.at, row.older
    beside = values if is_latest else ["older"]
    alone = values if columns["alone"] == ["restores"] else columns["alone"]
    structure = ["opens"] if columns["opens"] is True else values if columns["opens"] is False else ["opens", *values]
    by_path = columns["by_path"] or values
    restores_it = bool({"this", "tree"}.intersection(values))
    wanted: dict[str, list[Any] | None] = {
        "latest_checkpoint": [at if is_latest else older],
        "available_steps": [[5, 6] if columns["is_step"] else [5]],
        **dict.fromkeys(("restore_checkpoint, path", "restore, path"), by_path),
        **dict.fromkeys(("restore_checkpoint, step", "restore, step"), values),
        **dict.fromkeys(("restore_checkpoint, latest", "restore, latest"), beside),
        **dict.fromkeys(("restore_checkpoint, root", "restore, root"), beside),
        "restore_checkpoint, alone": alone,
        "restore, alone": ["CheckpointNotFoundError" if one == "nothing" else one for one in alone],
        **dict.fromkeys(("plan_restore, path", "open_checkpoint"), columns["by_path"] or structure),
        "plan_restore, latest": [older] if not is_latest else [at if one == "opens" else one for one in structure],
        "ls": columns["ls"],
        "show": {True: [0], False: [2]}.get(columns["opens"], [0, 2]),
        "verify, path": columns["verifies"],
        "verify, directory": columns["verified_as"],
        "diff": [0] if restores_it else [2],
        "convert": columns["converts"],
        "converted": values,
        "converted, beside the tree": [True],
        "clean lists": [[at] if "clean" in removed else []],
    }
    but = {consumer: None if others == "any" else others for consumer, others in row["but"].items()}
    return wanted | after_saves(row, columns, found) | but


def after_saves(row: Row, columns: dict[str, Any], found: dict[str, Any]) -> dict[str, list[Any] | None]:
    """What saves of other steps, and of this one, leave."""
    removed, is_step_6 = columns["may_be_removed"], row.at == f"{row.prefix}6"
    was_there = [] if row["kind"] == "absent" else ["row"]
    is_there = [] if row["reclaimed"] else was_there
    holds_nothing = row["kind"] == "absent" or row.base.startswith("empty ")
    # save() replaces what is certainly a checkpoint, items and temporaries too, by its own path, and nothing foreign.
    may_go = not row["kind"].startswith("foreign")
    refusing = {
        "save at 6": ["saved" if holds_nothing or not is_step_6 else "error"],
        "after save": [["5", "row, changed"] if holds_nothing and is_step_6 else ["5", *is_there]],
        "save()": ["saved"] if holds_nothing and is_step_6 else ["error", "saved"] if may_go else ["error"],
        "after save()": [["5", "row, changed"] if found.get("save()") == "saved" else ["5", *was_there]],
    }
    if removed == "any":
        return dict.fromkeys(("keep=1", "keep=2", "overwrite at 4", "overwrite at 6", "after overwrite"), None) | {
            "save at 5.5": ["saved"], "after 5.5": [["5", "row"]], **refusing
        }  # fmt: skip
    evicted = "keep" in removed
    older = ["5"] if row["in_manager"] else []  # a step with items, which saves never remove
    other_stays = older if columns["counts_for_keep"] else ["5"]
    is_replaced = is_step_6 and ("overwrite" in removed or row["kind"] == "absent")
    blocks = columns["blocks_lower_step"]
    return refusing | {
        "keep=1": [[*older, "7", *([] if evicted else is_there)]],
        "keep=2": [[*other_stays, "7", *is_there]],
        "overwrite at 4": [["4", *older, *([] if evicted else is_there)]],
        "save at 5.5": ["saved", "InvalidCheckpointError"] if blocks == "any" else
                       ["InvalidCheckpointError" if blocks else "saved"],
        "after 5.5": [["5", *is_there]],
        "overwrite at 6": ["saved"] if is_replaced or not is_step_6 else ["error"],
        "after overwrite": [["5", "row, changed"] if is_replaced else ["5", *is_there]],
    }  # fmt: skip


def agrees(found: Any, wanted: list[Any] | None) -> bool:
    """Whether what a consumer found is one of the alternatives; ``error`` is any class of an error."""
    is_error = isinstance(found, str) and isinstance(getattr(errors, found, None), type)
    return wanted is None or found in wanted or ("error" in wanted and is_error)


def wrong(look: Look) -> list[str]:
    """What consumers find that they should not, a line each."""
    found = look_ups(look) | views(look) | conversions(look) | changes(look)
    wanted = expected(look.row, found)
    lines = [
        f"{consumer}: found {value}, expected {' or '.join(map(str, wanted[consumer] or ()))}"
        for consumer, value in found.items()
        if not agrees(value, wanted[consumer])
    ]
    return lines + list(wrong_texts(look, found))


def wrong_texts(look: Look, found: dict[str, Any]) -> Iterator[str]:
    """What errors must say, and what they must never advise."""
    row = look.row
    said = look.texts.get("restore_checkpoint, step", look.texts.get("restore_checkpoint, path"))
    missing = [word for word in row["says"] if said is not None and word not in said.replace(look.root, "")]
    if missing:
        yield f"the error does not say {', '.join(missing)}: {said}"
    if row["kind"] != "temporary" and not row["may_advise_deletion"]:
        for consumer, text in look.texts.items():
            if "delete" in text.lower() and consumer != "clean":
                yield f"{consumer} advises to delete: {text}"
                break
    if row["names_older"] and found["latest_checkpoint"] == row.at:
        text = look.texts.get("restore_checkpoint, latest", "").replace(look.root, "")
        if not re.search(rf"(\bstep[ =]|/){row.prefix}5\b|\b{row.prefix or 'step '}5\b", text):
            yield f"the error of the latest does not name {row.older}: {text}"
