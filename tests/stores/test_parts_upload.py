"""Large msgpack files go to s3:// in parts, by several connections, and appear whole, on a condition, or not at all."""

from __future__ import annotations

import datetime
import logging
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints, cli
from flax_ckpt_compat._core.object_store import client, parts_upload, s3_requests, uploads, writer_markers
from flax_ckpt_compat._core.progress import Meter, Progress
from flax_ckpt_compat.errors import StorageError
from tests.support.layouts import assert_same
from tests.support.s3 import SIGNED, Answer, Bucket

PART = 5 * 2**20  # S3's least, but for the last one
CONTENT = np.random.default_rng(0).bytes(2 * PART + 1000)
XML = [("Content-Type", "application/xml")]
REFUSED = b"<Error><Code>PreconditionFailed</Code><Message>At least one condition did not hold</Message></Error>"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files from one part on are large."""
    monkeypatch.setattr(uploads, "PARTS_FROM_BYTES", PART)
    monkeypatch.setattr(parts_upload, "_PART_BYTES", PART)
    monkeypatch.setattr(parts_upload, "_tried", {})
    yield
    s3_requests._client.cache_clear()


@pytest.fixture
def strict(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket of a store that keeps both conditions when an upload is completed, as S3 does; moto ignores If-Match."""
    store = bucket.proxy.store

    def keep(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        wanted = {name.lower(): value for name, value in headers.items()}.get("if-match")
        if method == "POST" and wanted is not None:
            status, found, _ = store("GET", path.partition("?")[0], dict(SIGNED), b"")
            etag = {name.lower(): value for name, value in found}.get("etag")
            if status == 404 or etag != wanted:
                return 412, XML, REFUSED
        return store(method, path, headers, body)

    monkeypatch.setattr(bucket.proxy, "store", keep)
    return bucket


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The path of a file of three parts."""
    (tmp_path / "file").write_bytes(CONTENT)
    return str(tmp_path / "file")


def asked(bucket: Bucket, method: str, *words: str) -> list[str]:
    """The requests of a method whose paths hold these words."""
    return [one.path for one in bucket.proxy.log if one.method == method and all(word in one.path for word in words)]


def unfinished(bucket: Bucket) -> list[str]:
    """The keys of all uploads that are neither completed nor aborted."""
    page = ElementTree.fromstring(bucket._ask("GET", "?uploads")[2])
    return [node.text or "" for node in page.iterfind("{*}Upload/{*}Key")]


def test_in_parts(strict: Bucket, file: str) -> None:
    """Three parts and a completion, which replaces the version that was found, or nothing; nothing else is left."""
    url = f"{strict.url}/run/c"
    reports: list[Progress] = []
    meter = Meter(reports.append)
    meter.begin(url, 10)
    with meter.reporting():
        assert uploads.publish_file(file, url, meter, new=True)
    assert strict.get("run/c") == CONTENT
    assert len(asked(strict, "PUT", "/run/c", "partNumber")) == 3
    assert [path for path in asked(strict, "PUT", "/run/c") if "partNumber" not in path] == []
    Path(file).write_bytes(CONTENT[::-1])
    assert uploads.publish_file(file, url, new=False)
    assert strict.get("run/c") == CONTENT[::-1]
    assert strict.keys() == ["run/c"]
    assert unfinished(strict) == []
    assert len(asked(strict, "POST", "run/_", ".probe/", "uploadId")) == 2  # one of each kind, tried out once
    assert reports[-1].finished


def test_saves_and_restores(strict: Bucket) -> None:
    """A checkpoint that was sent in parts comes back, and replaces another one only where that is allowed."""
    tree = {"w": np.arange(2_000_000.0), "n": 3}
    path = flax_ckpt_compat.save(strict.url + "/run", tree, step=1, format="msgpack")
    assert_same(flax_ckpt_compat.restore(path), tree)
    flax_ckpt_compat.save(strict.url + "/run", {**tree, "n": 4}, step=1, format="msgpack", overwrite=True)
    assert_same(flax_ckpt_compat.restore(path), {**tree, "n": 4})
    assert len(asked(strict, "PUT", "checkpoint_1", "partNumber")) == 2 * 4
    assert strict.keys() == ["run/checkpoint_1"]


def test_a_condition_that_does_not_hold(strict: Bucket, file: str) -> None:
    """What another writer wrote meanwhile stays where nothing may be replaced; else it is looked for again."""
    url = f"{strict.url}/run/c"
    others = [b"another", b"other"]

    def write_first(method: str, path: str) -> str:
        if method == "POST" and path.startswith(f"/{strict.name}/run/c?") and "uploadId" in path and others:
            strict.put("run/c", others.pop())
        return ""

    with strict.proxy.failing(write_first):
        assert not uploads.publish_file(file, url, new=True)
        assert strict.get("run/c") == b"other"
        assert uploads.publish_file(file, url, new=False)
    assert strict.get("run/c") == CONTENT
    assert unfinished(strict) == []


def test_an_empty_object_is_replaced(strict: Bucket, file: str) -> None:
    """As everywhere: it holds nothing."""
    strict.put("run/c", b"")
    assert uploads.publish_file(file, f"{strict.url}/run/c", new=True)
    assert strict.get("run/c") == CONTENT


@pytest.mark.parametrize(
    ("which", "fault"),
    [
        ("uploadId", "lose"),
        *(
            pytest.param(which, fault, marks=pytest.mark.slow)
            for which in ("uploads", "partNumber=2", "uploadId")
            for fault in ("refuse", "lose", "cut", "500")
            if (which, fault) != ("uploadId", "lose")
        ),
    ],
)
def test_requests_that_fail_once(strict: Bucket, file: str, which: str, fault: str) -> None:
    """Each is tried again; an answer that was lost does not make the save fail, and leaves no parts that are in use."""
    left = [fault]

    def fail(method: str, path: str) -> str:
        is_meant = method in ("POST", "PUT") and "/run/c?" in path and which in urllib.parse.unquote(path)
        return left.pop() if is_meant and left else ""

    with strict.proxy.failing(fail):
        assert uploads.publish_file(file, f"{strict.url}/run/c", new=True)
    assert not left
    assert strict.get("run/c") == CONTENT
    # An upload whose beginning was not answered has no parts, and cannot be named.
    assert len(unfinished(strict)) <= (which == "uploads")


def test_a_store_that_ends_an_upload_twice(strict: Bucket, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 knows no upload that was completed: whether it was by us, the content tells."""
    store, ended = strict.proxy.store, list[str]()

    def forget(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method == "POST" and "/run/c?" in path and "uploadId" in path:
            if ended:
                return 404, XML, b"<Error><Code>NoSuchUpload</Code></Error>"
            ended.append(path)
            store(method, path, headers, body)
            return 500, XML, b"<Error><Code>InternalError</Code></Error>"
        return store(method, path, headers, body)

    monkeypatch.setattr(strict.proxy, "store", forget)
    assert uploads.publish_file(file, f"{strict.url}/run/c", new=True)
    assert strict.get("run/c") == CONTENT


def test_a_completion_that_is_never_answered(strict: Bucket, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it took effect, the file is saved, and else it is not; the content tells."""
    monkeypatch.setattr("flax_ckpt_compat._core.object_store.retrying._FIRST_PAUSE", 0.01)
    url = f"{strict.url}/run/c"
    for fault, is_saved in (("refuse", False), ("lose", True)):

        def fail(method: str, path: str, fault: str = fault) -> str:
            return fault if method == "POST" and "/run/c?" in path and "uploadId" in path else ""

        with strict.proxy.failing(fail):
            if is_saved:
                assert uploads.publish_file(file, url, new=True)
            else:
                with pytest.raises(StorageError):
                    uploads.publish_file(file, url, new=True)
        assert strict.keys() == ["run/c"] * is_saved
        assert unfinished(strict) == []


@pytest.mark.parametrize(
    "which",
    ["partNumber=2", pytest.param("uploads", marks=pytest.mark.slow), pytest.param("uploadId", marks=pytest.mark.slow)],
)
def test_requests_that_are_refused(strict: Bucket, file: str, which: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever may not be done in parts is done in one request, and no part is left."""

    def refuse(method: str, path: str) -> str:
        is_meant = method in ("POST", "PUT") and "/run/c?" in path and which in path
        return "403" if is_meant and not (which == "uploadId" and method == "PUT") else ""

    with caplog.at_level(logging.INFO, "flax_ckpt_compat"), strict.proxy.failing(refuse):
        assert uploads.publish_file(file, f"{strict.url}/run/c", new=True)
    assert "is written by one connection: " in caplog.text
    assert strict.get("run/c") == CONTENT
    assert unfinished(strict) == []


def test_failures_abort(strict: Bucket, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that fails for good, and Ctrl-C, leave neither an object nor parts."""
    monkeypatch.setattr("flax_ckpt_compat._core.object_store.retrying._FIRST_PAUSE", 0.01)
    url = f"{strict.url}/run/c"
    with (
        strict.proxy.failing(lambda method, path: "500" if "partNumber=3" in path else ""),
        pytest.raises(StorageError),
    ):
        uploads.publish_file(file, url, new=True)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts_upload._Upload, "_complete", interrupt)
    monkeypatch.setattr(parts_upload, "_tried", dict.fromkeys(parts_upload._tried, True))
    with pytest.raises(KeyboardInterrupt):
        uploads.publish_file(file, url, new=True)
    assert strict.keys() == []
    assert unfinished(strict) == []


def test_a_store_that_ignores_conditions(bucket: Bucket, file: str, caplog: pytest.LogCaptureFixture) -> None:
    """That is tried out first: what replaces an object then goes by one connection, with TensorStore's condition."""
    url = f"{bucket.url}/run/c"
    assert uploads.publish_file(file, url, new=True)  # whose condition moto keeps
    assert len(asked(bucket, "PUT", "/run/c", "partNumber")) == 3
    with caplog.at_level(logging.INFO, "flax_ckpt_compat"):
        assert uploads.publish_file(file, url, new=False)
        assert uploads.publish_file(file, url, new=False)
    assert caplog.text.count("ignores conditions on uploads in parts") == 1
    assert len(asked(bucket, "PUT", "/run/c", "partNumber")) == 3
    assert bucket.keys() == ["run/c"]
    assert unfinished(bucket) == []


def test_without_botocore(strict: Bucket, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request writes the file, and nothing is asked about parts."""
    monkeypatch.setattr(s3_requests, "is_installed", lambda: False)
    assert uploads.publish_file(file, f"{strict.url}/run/c", new=True)
    assert asked(strict, "POST") == []
    assert client.scheme_of(strict.url).unfinished_uploads(strict.url) == {}


def test_clean_removes_parts_of_dead_writers(strict: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a day: with those of a name that is free, and of one that has a complete checkpoint, which stays."""
    flax_ckpt_compat.save(f"{strict.url}/run", {"n": 1}, step=1, format="msgpack")
    spec = client.scheme_of(strict.url).bucket_spec(strict.name)
    for name in ("run/checkpoint_1", "run/checkpoint_2", "run/deep/checkpoint_3", "running"):
        parts_upload._Upload(f"{strict.url}/{name}", spec)._part(np.zeros(9, np.uint8), 1, 9)
    # All of moto's have begun in 2010.
    since = datetime.datetime.now(datetime.UTC) - datetime.datetime(2010, 11, 11, tzinfo=datetime.UTC)
    with monkeypatch.context() as young:
        young.setattr(writer_markers, "EXPIRES_AFTER", since.total_seconds() + 7 * 86400)
        result = CliRunner().invoke(cli.main, ["clean", f"{strict.url}/run", "--yes"])
        assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "0 to remove, 0 B.")
    result = CliRunner().invoke(cli.main, ["clean", f"{strict.url}/run", "--dry-run"])
    assert result.exit_code == 1
    assert "2 to remove" in result.stdout
    assert CliRunner().invoke(cli.main, ["clean", f"{strict.url}/run", "--yes"]).exit_code == 0
    assert sorted(unfinished(strict)) == ["run/deep/checkpoint_3", "running"]
    assert flax_ckpt_compat.restore(f"{strict.url}/run") == {"n": 1}


def test_a_process_that_dies_while_it_tries_a_store(strict: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The object that it leaves hides no checkpoint and is none, and goes as what dead writers leave goes."""
    run, send = f"{strict.url}/run", s3_requests.send
    flax_ckpt_compat.save(run, {"n": 1}, step=1, format="msgpack")

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(parts_upload, "_Upload", die)
        dying.setattr(s3_requests, "send", lambda url, doing, *rest: doing == "deleted" or send(url, doing, *rest))
        parts_upload._refuses(f"{run}/checkpoint_2", client.scheme_of(run).bucket_spec(strict.name), "IfMatch")
    assert len(strict.keys("run/_")) == 1
    assert flax_ckpt_compat.restore(run) == {"n": 1}
    assert checkpoints.available_steps(run) == [1]
    assert checkpoints.latest_checkpoint(run, "") == f"{run}/checkpoint_1"
    assert len(flax_ckpt_compat.verify(run).checkpoints) == 1
    monkeypatch.setattr(writer_markers, "EXPIRES_AFTER", -1)
    assert CliRunner().invoke(cli.main, ["clean", run, "--yes"]).exit_code == 0
    assert strict.keys() == ["run/checkpoint_1"]
