"""Lists that gs:// refuses, which TensorStore takes for empty ones: an error that says so, and nothing is lost."""

from __future__ import annotations

import base64
import itertools
import json
import sys
import threading
import time
import types
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat import errors
from flax_ckpt_compat._core.object_store import client, gs
from tests.support import s3
from tests.support.gs import TOKEN, GsBucket
from tests.support.saves import tree
from tests.support.store_places import put_back

CALLS: list[Callable[[str], Any]] = [
    ours.latest_checkpoint,
    ours.available_steps,
    lambda root: ours.restore_checkpoint(root, {"a": 1}),
    lambda root: ours.restore_checkpoint(root, {"a": 1}, step=3),
    flax_ckpt_compat.restore,
    flax_ckpt_compat.open_checkpoint,
    lambda root: list(flax_ckpt_compat.iter_checkpoints(root)),
    lambda root: ours.save_checkpoint(root, {"a": 1}, 1),
]


def is_list(method: str, path: str) -> bool:
    """Whether a request asks for names."""
    return method == "GET" and path.partition("?")[0].endswith("/o")


def refuse_list(number: int, fault: s3.Fault, *, on: bool = False) -> s3.Rule:
    """The list of this number is refused; all that follow too where that is asked for."""
    seen = iter(range(10**6))

    def rule(method: str, path: str) -> s3.Fault:
        if not is_list(method, path):
            return ""
        at = next(seen)
        return fault if at == number or (on and at > number) else ""

    return rule


@pytest.mark.parametrize("call", CALLS)
def test_no_bucket(call: Callable[[str], Any], gs_bucket: GsBucket) -> None:
    """No function takes a missing bucket for a place without checkpoints."""
    with pytest.raises(errors.StorageError, match="there is no bucket 'not-there'"):
        call("gs://not-there/run")


@pytest.mark.parametrize("call", CALLS)
def test_expired_credentials(call: Callable[[str], Any], gs_bucket: GsBucket) -> None:
    """They are told as such, and not as an empty folder, nor as the network."""
    gs_bucket.proxy.token = "a newer one"
    with pytest.raises(errors.StorageError, match="credentials have expired or are not valid"):
        call(f"{gs_bucket.url}/run")


@pytest.mark.parametrize("known", [True, False], ids=["token", "no token"])
@pytest.mark.parametrize("call", CALLS)
def test_who_may_not_list(
    call: Callable[[str], Any], known: bool, gs_bucket: GsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the token is not known here, because TensorStore alone has it."""
    monkeypatch.setattr(gs, "token", lambda: TOKEN if known else None)
    gs_bucket.proxy.may_list = False
    with pytest.raises(errors.StorageError, match=r"storage\.objects\.list denied.*do not permit this"):
        call(f"{gs_bucket.url}/run")


@pytest.mark.parametrize("bucket_there", [True, False])
def test_where_the_token_is_not_known(bucket_there: bool, gs_bucket: GsBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without one tells whether there is a bucket."""
    monkeypatch.setattr(gs, "token", lambda: None)
    if bucket_there:
        assert ours.available_steps(f"{gs_bucket.url}/run") == []
        return
    with pytest.raises(errors.StorageError, match="there is no bucket"):
        ours.available_steps("gs://not-there/run")


def slow_but(cases: Iterable[tuple[Any, ...]], *default: tuple[Any, ...]) -> list[Any]:
    """All cases as parameters; those not named run with ``-m slow`` only."""
    return [pytest.param(*case, marks=() if case in default else pytest.mark.slow) for case in cases]


def outcome(act: Callable[[], Any]) -> Any:
    """What a call gives, or its refusal."""
    try:
        return act()
    except errors.StorageError as error:
        assert "could not be listed" in str(error) or "no names" in str(error), error
        return None


@pytest.mark.parametrize(
    ("fault", "format", "on"),
    slow_but(
        itertools.product(["400", "403", "416"], ["msgpack", "orbax"], [False, True]),
        ("400", "msgpack", True), ("400", "orbax", False), ("403", "orbax", True), ("416", "msgpack", False),
    ),
)  # fmt: skip
def test_a_refused_list_in_a_reader(fault: str, format: Any, on: bool, gs_bucket: GsBucket) -> None:
    """Whichever list it is: the answer is the right one, or an error of the store."""
    root = f"{gs_bucket.url}/run"
    for step in (1, 2):
        flax_ckpt_compat.save(root, tree(step), step=step, format=format)
    for act, expected in (
        (lambda: ours.latest_checkpoint(root), f"{root}/checkpoint_2"),
        (lambda: ours.available_steps(root), [1, 2]),
        (lambda: ours.restore_checkpoint(root, tree(0))["n"], 2),
        (lambda: ours.restore_checkpoint(root, tree(0), step=1)["n"], 1),
    ):
        for number in range(30):
            gs_bucket.proxy.log.clear()
            with gs_bucket.proxy.failing(refuse_list(number, fault, on=on)):
                found = outcome(act)
            assert found in (expected, None)
            if not any(asked.fault for asked in gs_bucket.proxy.log):
                break
        else:
            raise AssertionError("it never ended")


SOME_SAVES = [
    ("msgpack new", False, 5),
    ("orbax new", True, 7),
    ("msgpack overwrite", True, 5),
    ("orbax overwrite", False, 7),
]


@pytest.mark.parametrize(
    ("how", "on", "every"),
    slow_but(
        [*SOME_SAVES, *itertools.product([how for how, *_ in SOME_SAVES], [False, True], [1])], *SOME_SAVES
    ),
)  # fmt: skip
def test_a_refused_list_in_a_save(how: str, on: bool, every: int, gs_bucket: GsBucket) -> None:
    """A save with retention: what it says is what is there, and of what was there only what it should is gone."""
    format, _, rest = how.partition(" ")
    saved = 3 if rest == "overwrite" else 4
    for step in (1, 2, 3):
        flax_ckpt_compat.save(f"{gs_bucket.url}/first", tree(step), step=step, format=format)  # type: ignore[arg-type]
    contents = {key: gs_bucket.get(key) for key in gs_bucket.keys("first/")}
    for number in range(0, 80, every):
        root = f"{gs_bucket.url}/run{number}"
        put_back(gs_bucket, contents, f"run{number}")
        gs_bucket.proxy.log.clear()
        said = None
        with gs_bucket.proxy.failing(refuse_list(number, "403", on=on)):
            try:
                flax_ckpt_compat.save(
                    root,
                    tree(100 + saved),
                    step=saved,
                    format=format,
                    keep=2,
                    overwrite=saved == 3,  # type: ignore[arg-type]
                )
            except errors.StorageError as error:
                said = str(error)
                assert "could not be listed" in said, said
        there = ours.available_steps(root)
        assert {3, saved - 1} <= {*there}, number
        assert 2 in there or saved in there, number
        found = ours.restore_checkpoint(root, None, there[-1])["n"]
        assert found == (100 + saved if said is None or "was saved" in said else 3), said
        if said is None:
            assert there == [saved - 1, saved]
        if not any(asked.fault for asked in gs_bucket.proxy.log):
            assert said is None
            return
    raise AssertionError("it never succeeded")


@pytest.mark.parametrize("fault", ["400", "401", "403", "404"])
def test_a_refused_page(fault: str, gs_bucket: GsBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later page that is refused does not cut the list."""
    monkeypatch.setattr(gs, "_PAGE", 3)
    gs_bucket.proxy.page = 3
    for number in range(10):
        gs_bucket.put(f"run/{number}", b"x")
    expected = [str(number) for number in range(10)]
    assert client.fresh_keys(f"{gs_bucket.url}/run") == expected
    for page in ("pageToken=3", "pageToken=6"):
        once = iter([fault])
        with gs_bucket.proxy.failing(lambda method, path, page=page, once=once: next(once, "") if page in path else ""):
            assert client.fresh_keys(f"{gs_bucket.url}/run") == expected


def test_a_condition_that_was_not_given(gs_bucket: GsBucket) -> None:
    """HTTP 412 to a plain read, write or deletion is a refusal, and not an empty object or something done."""
    url = f"{gs_bucket.url}/run/a"
    client.write(url, b"x")
    with gs_bucket.proxy.failing(lambda method, path: "412"):
        for act in (lambda: client.read(url), lambda: client.write(url, b"y"), lambda: client.delete(url)):
            with pytest.raises(errors.StorageError, match="condition"):
                act()
    assert gs_bucket.get("run/a") == b"x"


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Any]]]:
    """A server that issues tokens, as Google's and as a machine's do, and what it was asked."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.path, self.headers.get("Metadata-Flavor"), body))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": TOKEN, "expires_in": 3600}).encode())

        do_GET = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        for name in ("GOOGLE_AUTH_TOKEN_FOR_TESTING", "GOOGLE_APPLICATION_CREDENTIALS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
        monkeypatch.setattr(gs, "_cache", {})
        yield f"127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def test_the_token_of_a_user(issuer: tuple[str, list[Any]], tmp_path: Path) -> None:
    """Of `gcloud auth application-default login`: refreshed once, and kept."""
    host, asked = issuer
    user = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
    (tmp_path / "application_default_credentials.json").write_text(
        json.dumps({**user, "token_uri": f"http://{host}/token"})
    )
    assert [gs.token(), gs.token()] == [TOKEN, TOKEN]
    ((path, _, body),) = asked
    assert path == "/token"
    assert b"refresh_token=r" in body
    assert b"grant_type=refresh_token" in body


def test_the_token_of_a_machine(issuer: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the metadata server of a virtual machine."""
    host, asked = issuer
    monkeypatch.setenv("GCE_METADATA_ROOT", host)
    assert gs.token() == TOKEN
    assert asked == [("/computeMetadata/v1/instance/service-accounts/default/token", "Google", b"")]


@pytest.fixture
def key(issuer: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The key of a service account, whose file the variable names."""
    pytest.importorskip("google.auth")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    kinds = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = {"type": "service_account", "client_email": "job@project", "private_key_id": "7"}
    file |= {"private_key": key.private_bytes(*kinds).decode(), "token_uri": f"http://{issuer[0]}/token"}
    (tmp_path / "key.json").write_text(json.dumps(file))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    return key


def test_the_token_of_a_service_account(issuer: tuple[str, list[Any]], key: Any) -> None:
    """Asked for with a signature of its key, as RFC 7523 and Google's documentation say, and kept."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    assert [gs.token(), gs.token()] == [TOKEN, TOKEN]
    ((path, _, body),) = issuer[1]
    assert path == "/token"
    fields = dict(urllib.parse.parse_qsl(body.decode()))
    assert fields["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    signed = fields["assertion"].rpartition(".")[0]
    decoded = [base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in fields["assertion"].split(".")]
    key.public_key().verify(decoded[2], signed.encode(), padding.PKCS1v15(), hashes.SHA256())
    header, claims = map(json.loads, decoded[:2])
    assert header["alg"] == "RS256"
    assert header["kid"] == "7"
    assert claims["iss"] == "job@project"
    assert claims["aud"] == f"http://{issuer[0]}/token"
    assert claims["scope"].startswith("https://www.googleapis.com/auth/devstorage.")
    assert claims["exp"] - claims["iat"] == 3600
    assert abs(claims["iat"] - time.time()) < 60


def test_the_key_of_a_service_account_without_google_auth(
    issuer: tuple[str, list[Any]], key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is known, and nothing is asked."""
    del key
    monkeypatch.setitem(sys.modules, "google.auth", None)
    assert gs.token() is None
    assert issuer[1] == []


@pytest.mark.parametrize("content", ['{"type": "service_account"}', '{"type": "external_account"}', "[]", "7", "{", ""])
def test_a_file_without_a_key(
    content: str, issuer: tuple[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is known where the file is damaged, or of another kind, and nothing is asked."""
    (tmp_path / "key.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    assert gs.token() is None
    assert issuer[1] == []


def test_a_token_is_renewed_before_it_expires(issuer: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour later, less a minute: requests that take it along need some time."""
    host, asked = issuer
    monkeypatch.setenv("GCE_METADATA_ROOT", host)
    for seconds, times in ((0, 1), (3539, 1), (3541, 2)):
        monkeypatch.setattr(gs, "time", types.SimpleNamespace(monotonic=lambda seconds=seconds: 1e6 + seconds))
        assert gs.token() == TOKEN
        assert len(asked) == times


def test_a_token_that_no_longer_holds(
    issuer: tuple[str, list[Any]], gs_bucket: GsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was revoked, or the machine slept meanwhile, which its clock does not count: another one is asked for."""
    url = f"{gs_bucket.url}/run"
    assert ours.available_steps(url) == []  # TensorStore reads the variable at its first request
    monkeypatch.delenv("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    monkeypatch.setenv("GCE_METADATA_ROOT", issuer[0])
    gs_bucket.put("run/a", b"x")
    for act, expected in (
        (lambda: ours.available_steps(f"{url}/none"), []),
        (lambda: gs.GS().stored_size(f"{url}/a"), 1),
    ):
        monkeypatch.setattr(gs, "_cache", {"metadata": (float("inf"), "revoked")})
        assert act() == expected
        assert gs.token() == TOKEN
    assert len(issuer[1]) == 2


@pytest.mark.parametrize(("answered", "seconds"), [(True, 10), (False, 300)])
def test_a_json_api_that_is_out_of_reach(
    answered: bool, seconds: int, gs_bucket: GsBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads go on without its checksums: for ten seconds, or, where it never answered, for five minutes."""
    url, now = f"{gs_bucket.url}/run/a", [1e6]
    gs_bucket.put("run/a", b"123456789")
    checksum = 0xE3069283  # the check value of CRC-32C, RFC 3720
    monkeypatch.setattr(gs, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    if answered:
        assert client.stored_crc32c(url) == checksum
    with gs_bucket.proxy.failing(lambda method, path: "refuse"):
        assert client.stored_crc32c(url) is None
    for later, expected in ((seconds - 1, None), (2, checksum)):
        now[0] += later
        assert client.stored_crc32c(url) == expected


def test_answers_of_the_json_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty page need not be the last one, and the size of what is sent uncompressed is not the stored one."""
    monkeypatch.setattr(gs, "token", lambda: None)
    pages = iter([{"nextPageToken": "1"}, {"nextPageToken": "2", "items": []}, {"items": [{"name": "run/a"}]}])
    monkeypatch.setattr(gs, "_send", lambda request, timeout: (200, next(pages)))
    assert gs._request_api("gs://bucket/run", b"run/", b"run0", None) == (200, {"items": [{"name": "run/a"}]})
    for told, size in (({"size": "5"}, 5), ({"size": "5", "contentEncoding": "gzip"}, None)):
        monkeypatch.setattr(gs, "_send", lambda request, timeout, told=told: (200, told))
        assert gs.GS().stored_size("gs://bucket/run/a") == size


@pytest.mark.parametrize("fault", ["408", "429", "503"])
def test_a_store_that_is_busy(fault: str, gs_bucket: GsBucket) -> None:
    """The JSON API may ask to try again, as the rest of the store does."""
    gs_bucket.put("run/a", b"x")
    once = iter([fault])
    with gs_bucket.proxy.failing(lambda method, path: next(once, "") if "maxResults=1&" in path else ""):
        assert client.fresh_keys(f"{gs_bucket.url}/none") == []
    assert next(once, "") == ""
