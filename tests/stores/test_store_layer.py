"""Objects as files: what is there, how large it is, any part of it, and what is said where a store refuses."""

from __future__ import annotations

import os
import socket
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core import orbax_layout
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.object_store import client, commit, request_errors, retrying, uploads
from flax_ckpt_compat._core.object_store.storage import ObjectStorage, OpenedObject
from flax_ckpt_compat._discovery import step_lookup
from tests.support import s3
from tests.support.profiles import examples
from tests.support.s3 import Bucket
from tests.support.store_places import AnyBucket

KEYS = ["a", "a.b", "a/b", "a/b/c d", "a/ü", "a0", "a-", "b/%2F+&?", "c"]


def test_listing_is_that_of_boto3(bucket: Bucket) -> None:
    """Folders hold what begins with their name and a slash, and nothing of names that are longer or in between."""
    import boto3  # takes long, and the processes of the other tests collect this one, too

    for key in KEYS:
        bucket.put(key, b"x")
    theirs = boto3.client("s3", region_name="us-east-1").list_objects_v2(Bucket=bucket.name)["Contents"]
    assert client.keys(bucket.url) == sorted(KEYS) == sorted(entry["Key"] for entry in theirs)
    for folder in ("a", "a/b", "b", "c", "a0"):
        expected = [key.removeprefix(f"{folder}/") for key in KEYS if key.startswith(f"{folder}/")]
        assert client.keys(f"{bucket.url}/{folder}") == sorted(expected)
    assert location_of(f"{bucket.url}/a").listdir() == ["b", "ü"]
    assert [location_of(f"{bucket.url}/{key}").isdir() for key in ("a", "a0", "b", "")] == [True, False, True, True]
    assert [location_of(f"{bucket.url}/{key}").isfile() for key in ("a0", "c", "b", "none")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(FileNotFoundError):
        location_of(f"{bucket.url}/none").listdir()


def test_what_changes_is_listed_again(bucket: Bucket) -> None:
    """A look-up that finds its listing old gets another one, also where its caller has made the first."""
    bucket.put("run/a", b"x")

    def look(listed: Location, last: bool) -> list[str]:
        assert not last
        if listed.listdir() == ["a"]:
            bucket.put("run/b", b"x")
            raise step_lookup.ChangedError
        return listed.listdir()

    assert step_lookup.list_again_while_it_changes(location_of(f"{bucket.url}/run").listed(), look) == ["a", "b"]


def test_an_object_and_a_folder_of_one_name(bucket: Bucket) -> None:
    """The folder counts, unless its upload has not ended."""
    url = f"{bucket.url}/c"
    bucket.put("c", b"x")
    assert (location_of(url).isfile(), location_of(url).isdir()) == (True, False)
    bucket.put(f"c/{orbax_layout.BEGUN}.1.{'0' * 32}", b"")
    bucket.put("c/_METADATA", b"x")
    assert (location_of(url).isfile(), location_of(url).isdir()) == (True, False)
    bucket.put("c/commit_success.txt", b"x")
    assert (location_of(url).isfile(), location_of(url).isdir()) == (False, True)


def test_a_folder_that_a_console_made_is_no_object(bucket: Bucket) -> None:
    """An empty object whose name ends in a slash is neither a name in the folder nor a checkpoint."""
    bucket.put("run/", b"")
    flax_ckpt_compat.save(f"{bucket.url}/run", {"a": 1}, step=1, format="msgpack")
    assert location_of(f"{bucket.url}/run").listdir() == ["checkpoint_1"]
    assert ours.available_steps(f"{bucket.url}/run/") == [1]


def test_one_byte_is_not_nothing(any_bucket: AnyBucket) -> None:
    """A msgpack file may be a single byte; an empty object is not a checkpoint."""
    for content in (b"", b"\x07", b"ab"):
        any_bucket.put("run/file", content)
        assert client.head(f"{any_bucket.url}/run/file") == content


def test_long_listings_are_whole(bucket: Bucket) -> None:
    """More keys than a store gives at once are all there."""
    expected = [f"{number:04}" for number in range(s3.PAGE + 3)]
    client.in_parallel(lambda name: client.write(f"{bucket.url}/many/{name}", b""), expected)
    assert client.keys(f"{bucket.url}/many") == expected


@given(content=st.binary(max_size=200), bounds=st.tuples(st.integers(0, 220), st.integers(0, 220)))
@settings(max_examples=examples(40, quick=10), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_are_those_of_the_bytes(bucket: Bucket, content: bytes, bounds: tuple[int, int]) -> None:
    """Size and any range are those of the content, whether or not the store tells the size when it refuses."""
    bucket.put("object", content)
    url = f"{bucket.url}/object"
    assert client.read(url) == content
    assert client.size(url) == client.probed_size(url) == len(content)
    assert client.read_range(url, *bounds) == content[slice(*bounds)]
    assert OpenedObject(url).read(*bounds) == content[slice(*bounds)]


def test_a_directory_is_uploaded_as_it_is(bucket: Bucket, tmp_path: Path) -> None:
    """All files are there with their content, down to those without any; but the one that is left out."""
    contents = {
        "a": b"1",
        "d/e/f": bytes(70_000),
        "d/large": b"\0" + bytes(range(256)) * 9000,
        "d/empty": b"",
        "last": b"2",
    }
    for name, content in contents.items():
        (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / name).write_bytes(content)
    names = [name for name in contents if name != "last"]
    assert uploads.upload(str(tmp_path / "from"), f"{bucket.url}/x", names, {"a": client.NO_OBJECT}) == []
    bucket.download("x", tmp_path / "to")
    found = {name: (tmp_path / "to" / name).read_bytes() for name in ("a", "d/e/f", "d/empty", "d/large")}
    assert bucket.keys("x/") == ["x/a", "x/d/e/f", "x/d/empty", "x/d/large"]
    assert found == {name: contents[name] for name in found}


def test_names_that_look_like_paths(bucket: Bucket) -> None:
    """Removing a checkpoint removes just what lies below its name, also where a key spells a way out of it."""
    flax_ckpt_compat.save(f"{bucket.url}/run/checkpoint_1", {"a": 1}, format="orbax")
    stray = ["run/checkpoint_1//d", "run/checkpoint_1/../../other", "run/checkpoint_1/./x"]
    for key in ["other", "run/checkpoint_10", "run/checkpoint_1.txt", *stray]:
        bucket.put(key, b"mine")
    assert location_of(f"{bucket.url}/run").discard(["checkpoint_1"]) == {}
    left = set(bucket.keys())
    assert left >= {"other", "run/checkpoint_1.txt", "run/checkpoint_10"}
    assert all(".." in key or "/./" in key for key in left if key.startswith("run/checkpoint_1/"))
    assert not location_of(f"{bucket.url}/run/checkpoint_1").exists()


@pytest.mark.parametrize("format", ["msgpack", "orbax"])
def test_looking_around_reads_no_content(bucket: Bucket, format: Any) -> None:
    """Steps, the latest and records come from lists of names, from headers and the first bytes, of few requests."""
    root = f"{bucket.url}/run"
    for step in range(5):
        flax_ckpt_compat.save(root, {"a": np.arange(50_000)}, step=step, format=format)
    bucket.proxy.log.clear()
    assert ours.available_steps(root) == [0, 1, 2, 3, 4]
    assert ours.latest_checkpoint(root) == f"{root}/checkpoint_4"
    assert len(bucket.proxy.log) <= 2 + 2 * 5
    assert sum(asked.is_listing for asked in bucket.proxy.log) == 2
    assert len(list(flax_ckpt_compat.iter_checkpoints(root))) == 5
    assert not [asked for asked in bucket.proxy.log if asked.is_get and asked.status in (200, 206) and asked.sent > 32]


def test_only_what_is_asked_for_is_read(bucket: Bucket) -> None:
    """One leaf of many costs its bytes and the structure; a plan costs the structure; neither comes near the whole."""
    root, leaf = f"{bucket.url}/run", 2**20
    tree = {f"w{number}": np.full(leaf // 8, float(number)) for number in range(12)}
    flax_ckpt_compat.save(root, tree, step=1, format="msgpack")
    structure = 13 * 64 * 2**10
    bucket.proxy.log.clear()
    assert flax_ckpt_compat.plan_restore(root, tree).nbytes == 12 * leaf
    assert sum(asked.sent for asked in bucket.proxy.log) < structure
    bucket.proxy.log.clear()
    with flax_ckpt_compat.open_checkpoint(root) as opened:
        np.testing.assert_array_equal(opened.read("w7")["w7"], tree["w7"])
    assert leaf <= sum(asked.sent for asked in bucket.proxy.log) < leaf + structure


CALLS = [
    lambda url: ours.save_checkpoint(url, {"a": 1}, 1),
    lambda url: flax_ckpt_compat.save(f"{url}/x", {"a": 1}, format="orbax"),
    lambda url: ours.restore_checkpoint(url, {"a": 0}),
    lambda url: ours.restore_checkpoint(f"{url}/x", None, step=3),
    ours.latest_checkpoint,
    ours.available_steps,
    flax_ckpt_compat.open_checkpoint,
    flax_ckpt_compat.plan_restore,
    lambda url: list(flax_ckpt_compat.iter_checkpoints(url)),
]


@pytest.mark.parametrize("call", CALLS)
def test_a_bucket_that_is_not_there(bucket: Bucket, call: Any) -> None:
    """Every function says that there is no such bucket; none takes it for a place without checkpoints."""
    with pytest.raises(errors.StorageError, match=f"there is no bucket 'not-{bucket.name}'"):
        call(f"s3://not-{bucket.name}/run")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("hdfs://host/run", r"'hdfs://' is unknown; s3://, gs://, az:// and hf:// URLs"),
        ("s3:///run", "names no bucket; write s3://bucket/"),
        ("s3:/bucket/run", "pathlib made this of a URL"),
        ("s3://Not a bucket/run", "bucket"),
    ],
)
def test_urls_that_lead_nowhere(call: Any, url: str, told: str) -> None:
    """Every function says what is wrong with a URL; none makes a local folder of that name."""
    with pytest.raises(errors.StorageError, match=told):
        call(url)


@pytest.fixture
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a place at a server that answers everything with one error, and has no credentials."""
    status, code = request.param

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = f"<Error><Code>{code}</Code><Message>{code} it is.</Message></Error>".encode()
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else body)

        do_GET = do_HEAD = do_PUT = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    yield "s3://bucket/run"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("refusing", [(403, "AccessDenied"), (403, "InvalidAccessKeyId")], indirect=True)
def test_missing_or_wrong_credentials(refusing: str, call: Any) -> None:
    """Every function says that it is the credentials, and which variables give them."""
    with pytest.raises(errors.StorageError, match=r"credentials.*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        call(refusing)


@pytest.mark.parametrize(
    ("refusing", "remedy"),
    [
        ((400, "ExpiredToken"), "credentials have expired or are not valid: renew them"),
        pytest.param(
            (403, "ExpiredToken"), "credentials have expired or are not valid: renew them", marks=pytest.mark.slow
        ),
        ((400, "InvalidBucketName"), "'bucket' cannot be the name of a bucket"),
        (
            (400, "AuthorizationHeaderMalformed"),
            "in another region.*AWS_REGION.*or neither, so that the bucket is asked",
        ),
        ((400, "SomethingElse"), "SomethingElse it is.*the store refused the request"),
    ],
    indirect=["refusing"],
)
def test_what_is_refused_is_not_the_network(refusing: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the cause that the store gives."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    for call in CALLS:
        with pytest.raises(errors.StorageError, match=remedy) as caught:
            call(refusing)
        assert "network" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://a/run", "s3://b ucket/run", "gs://Upper_Case/run", "gs://a/run", "s3://b:80/run"]
)
def test_names_that_no_bucket_has(url: str) -> None:
    """They are told as such, before anything is asked of a network."""
    with pytest.raises(errors.StorageError, match="cannot be the name of a bucket"):
        ours.available_steps(url)


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x01b", "a\udcffb", "é" * 460])
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_names_that_no_object_has(scheme: str, name: str) -> None:
    """Stores refuse them, or list them changed, so that what was saved is not found: refused before any request."""
    root = f"{scheme}://bucket/run"
    for call in (
        lambda: ours.save_checkpoint(f"{root}/{name}", {}, 1),
        lambda: ours.save_checkpoint(root, {}, 1, prefix=f"{name}_"),
        lambda: ours.save_checkpoint(root, {}, name),
        lambda: flax_ckpt_compat.save(f"{root}/{name}", {}),
    ):
        with pytest.raises(errors.StorageError, match=r"has the character|9\d\d bytes without the bucket"):
            call()
    for look in (ours.latest_checkpoint, ours.available_steps) if len(name) < 9 else ():
        with pytest.raises(errors.StorageError, match="has the character"):
            look(root, f"{name}_")


def test_a_refusal_within_a_database_is_no_damage() -> None:
    """Whatever TensorStore says while it reads one: answers that tell of an object alone may be of what is stored."""
    told = "ExpiredToken: it is. [http_response_code='{}']"
    assert request_errors.is_store_error(ValueError(told.format(400)))
    assert not request_errors.is_store_error(ValueError(told.format(404)))
    assert not request_errors.is_store_error(ValueError("FAILED_PRECONDITION: CRC-32C checksum mismatch"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Waits and retries as in life, but shorter."""
    with monkeypatch.context() as patched:
        patched.setattr(retrying, "_RETRIES", {"max_retries": 2, "initial_delay": "10ms", "max_delay": "20ms"})
        patched.setattr(retrying, "_TIMEOUT", 0.3)
        patched.setattr(retrying, "_ATTEMPTS", 2)
        retrying.renew_context()
        yield
    retrying.renew_context()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("refusing", "remedy"),
    [
        ((500, "InternalError"), "check the network and the endpoint"),
        ((503, "SlowDown"), "try again later, or from fewer processes"),
        ((503, "ServiceUnavailable"), "try again later, or from fewer processes"),
    ],
    indirect=["refusing"],
)
def test_a_server_that_never_recovers(refusing: str, remedy: str) -> None:
    """It is given up after a bounded number of attempts, with an error that tells what it said and what to check."""
    with pytest.raises(errors.StorageError, match=remedy):
        ours.available_steps(refusing)


@pytest.mark.usefixtures("impatient")
def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up after a bounded time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(errors.StorageError, match="did not answer in time"):
            ours.available_steps("s3://bucket/run")


def test_requests_without_an_answer_do_not_block_others(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore sends 32 at once, and one that is never answered remains one of them, also when cancelled."""
    bucket.put("there", b"x")

    def read(number: int) -> None:
        with pytest.raises(errors.StorageError, match="did not answer in time"):
            location_of(f"{bucket.url}/{number}").read()

    with monkeypatch.context() as patched, bucket.proxy.failing(lambda method, path: "stall"):
        patched.setattr(retrying, "_TIMEOUT", 0.2)
        patched.setattr(retrying, "_MIN_RATE", 2**40)
        patched.setattr(retrying, "_ATTEMPTS", 1)
        with ThreadPoolExecutor(40) as pool:
            list(pool.map(read, range(40)))
    monkeypatch.setattr(retrying, "_TIMEOUT", 3.0)
    monkeypatch.setattr(retrying, "_ATTEMPTS", 1)
    monkeypatch.setattr(retrying, "_MIN_RATE", 2**40)
    assert location_of(f"{bucket.url}/there").read() == b"x"


@pytest.mark.parametrize("raised", [TimeoutError, KeyboardInterrupt])
def test_a_request_without_an_answer_is_cancelled_before_the_next(
    raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might still take effect, after requests that come later: the next try, or what is saved after Ctrl-C."""
    seen: list[str] = []

    class Unanswered:
        """What TensorStore returns for a request."""

        def __init__(self) -> None:
            seen.append("sent")

        def result(self, timeout: float) -> None:
            raise raised

        def cancel(self) -> None:
            seen.append("cancelled")

    monkeypatch.setattr(retrying, "_FIRST_PAUSE", 0.0)
    with pytest.raises((errors.StorageError, KeyboardInterrupt), match=r"^$|did not answer in time"):
        retrying.retry("s3://bucket/key", "written", Unanswered)
    assert seen == ["sent", "cancelled"] * (len(seen) // 2)
    assert (len(seen) == 2) == (raised is KeyboardInterrupt)


def test_what_tensorstore_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket, key, and the endpoint and region of the AWS tools' variables; gs:// is TensorStore's gcs driver."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    assert location_of("gs://bucket/a//b/").kvstore() == {"driver": "gcs", "bucket": "bucket", "path": "a/b/"}
    assert client.spec("gs://bucket/a/") == client.spec("gs://bucket/a")
    assert client.spec("s3://bucket") == {"driver": "s3", "bucket": "bucket"}
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert location_of("S3://bucket/./a").kvstore() == {
        "driver": "s3", "bucket": "bucket", "path": "a/", "aws_region": "eu-west-3"
    }  # fmt: skip
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://one:9000/")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://two:9000/")
    assert client.spec("s3://bucket/a")["endpoint"] == "http://two:9000"
    import tensorstore as ts

    for url in ("s3://bucket/a", "gs://bucket/a"):
        assert ts.KvStore.Spec(client.spec(url)).path == "a/"


@pytest.mark.parametrize(
    "names", [{"_METADATA", "manifest.ocdbt"}, {"_METADATA", "manifest.ocdbt", "commit_success.txt"}, {"default"}]
)
def test_in_google_storage_the_commit_file_decides(names: set[str]) -> None:
    """There Orbax itself writes without renaming; a copy by hand is told how to become complete."""
    why = commit.why_unfinished("gs://bucket/run/checkpoint_1", names)
    assert (why is None) == ("commit_success.txt" in names)
    assert why is None or "add an empty object" in why


@pytest.mark.parametrize(
    ("answers", "sent"),
    [
        (["UNAVAILABLE: busy"] * 3 + [""], 4),
        (["UNAVAILABLE: busy"] * 4, 4),
        (["PERMISSION_DENIED: no"], 1),
        (["ABORTED: all 10 retry attempts failed"], 1),
    ],
)
def test_what_is_tried_again(answers: list[str], sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times, for 30 s and 1 s a MiB each, after pauses that double from 0.1 to 0.2 s on; refusals are final."""
    pauses, waits, left = list[float](), list[float](), iter(answers)

    class Request:
        """What TensorStore returns for a request."""

        def result(self, timeout: float) -> str:
            waits.append(timeout)
            if text := next(left):
                raise ValueError(text)
            return "done"

        def cancel(self) -> None:
            """Nothing to cancel."""

    monkeypatch.setattr(retrying.time, "sleep", pauses.append)
    if answers[-1]:
        with pytest.raises(errors.StorageError):
            retrying.retry("s3://bucket/key", "read", Request, 5 << 20)
    else:
        assert retrying.retry("s3://bucket/key", "read", Request, 5 << 20) == "done"
    assert waits == [35.0] * sent
    assert len(pauses) == sent - 1
    assert all(0.1 <= pause / 2**number <= 0.2 for number, pause in enumerate(pauses))


def test_how_long_a_read_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer the more bytes there are; an object of unknown size may have 64 MiB."""
    asked: list[int] = []

    def answer(url: str, operation: str, request: Any, nbytes: int = 0, *, at_most: int = 0) -> Any:
        asked.append(nbytes or at_most)
        return types.SimpleNamespace(state="value", value=b"x")

    monkeypatch.setattr(client, "retry", answer)
    client.read("s3://bucket/key")
    client.read_range("s3://bucket/key", 3, 10)
    assert asked == [64 << 20, 7]


def test_what_was_learned_of_a_folder_is_its_listings_alone(bucket: Bucket) -> None:
    """In the next one, sizes and contents are those of now; objects that vanish, and others, are not part of it."""
    url, other = f"{bucket.url}/run", f"{bucket.url}/run2/x"
    for key in ("run/a", "run2/x"):
        bucket.put(key, b"12")
    for content in (b"12", b"345", b""):
        bucket.put("run/a", content)
        known = client.listing(url)
        store = ObjectStorage()
        for prefetch in (store.prefetch_sizes, store.prefetch_contents, store.prefetch_heads):
            prefetch([f"{url}/a", f"{url}/gone"], known)
        assert client.is_object(other, known) and client.head(other, known) == b"12"
        assert client.size(f"{url}/a", known) == len(content)
        assert client.read(f"{url}/a", known) == content
        assert client.head(f"{url}/a", known) == content


def test_the_largest_object(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit into one request is refused before anything is changed."""
    (tmp_path / "c" / "d").mkdir(parents=True)
    monkeypatch.setattr(uploads, "MAX_OBJECT", 10)
    for path in (tmp_path / "c", tmp_path / "c" / "d" / "x"):
        (tmp_path / "c" / "d" / "x").write_bytes(bytes(10))
        uploads.check_sizes(str(path), f"{bucket.url}/c")
        (tmp_path / "c" / "d" / "x").write_bytes(bytes(11))
        with pytest.raises(errors.StorageError, match="11 bytes is more than the 10"):
            uploads.check_sizes(str(path), f"{bucket.url}/c")
    for format in ("msgpack", "orbax"):
        with pytest.raises(errors.StorageError, match="more than the 10 that stores take"):
            flax_ckpt_compat.save(f"{bucket.url}/c", {"a": np.arange(9)}, format=format)  # type: ignore[arg-type]
    assert not [asked for asked in bucket.proxy.log if asked.method in ("PUT", "DELETE")]


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who made it could change what is saved before it is uploaded."""
    monkeypatch.setattr(commit.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / f"flax_ckpt_compat-{os.getuid()}"
    link.symlink_to("elsewhere")
    with pytest.raises(errors.StorageError, match="is not this user's own folder"):
        commit.staging_path("s3://bucket/run")
    link.unlink()
    assert Path(commit.staging_path("s3://bucket/run")).parent == link
    monkeypatch.setattr(commit.os, "getuid", lambda: 2**31 - 7)
    with pytest.raises(errors.StorageError, match="is not this user's own folder"):
        commit.staging_path("s3://bucket/run")
