"""Where the credentials of s3:// come from, and what happens once they have expired."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import flax_ckpt_compat
from flax_ckpt_compat import checkpoints as ours
from flax_ckpt_compat.errors import StorageError
from tests.support.s3 import Answer, Bucket

_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>Old.</Message></Error>"


def profile(name: str, key: str) -> str:
    """A part of AWS's file of credentials."""
    return f"[{name}]\naws_access_key_id = {key}\naws_secret_access_key = secret\n"


@pytest.fixture
def file(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's file of credentials, which are in no variable."""
    del bucket  # first it sets variables
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_DEFAULT_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path / "credentials"


class Keys(list[str]):
    """The keys with which requests are signed, and what happens once one is refused, which has expired."""

    def __init__(self) -> None:
        super().__init__()
        self.expired: dict[str, Callable[[], object]] = {}


@pytest.fixture
def keys(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Those of all requests to the bucket."""
    store, seen = bucket.proxy.store, Keys()

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        signed = {name.lower(): value for name, value in headers.items()}.get("authorization", "")
        seen.append(signed.partition("Credential=")[2].partition("/")[0])
        if seen[-1] not in seen.expired:
            return store(method, path, headers, body)
        seen.expired[seen[-1]]()
        return 400, [("Content-Type", "application/xml")], b"" if method == "HEAD" else _EXPIRED

    monkeypatch.setattr(bucket.proxy, "store", answer)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "DEFAULT"),
        ({"AWS_PROFILE": "team"}, "TEAM"),
        ({"AWS_DEFAULT_PROFILE": "team"}, "TEAM"),
        ({"AWS_PROFILE": "team", "AWS_ACCESS_KEY_ID": "OWN", "AWS_SECRET_ACCESS_KEY": "secret"}, "OWN"),
    ],
)
def test_a_profile(
    variables: dict[str, str], expected: str, bucket: Bucket, file: Path, keys: Keys, monkeypatch: Any
) -> None:
    """Requests are signed with its key, as those of the AWS tools; TensorStore alone would not sign them."""
    file.write_text(profile("default", "DEFAULT") + profile("team", "TEAM"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ours.available_steps(f"{bucket.url}/run") == []
    assert set(keys) == {expected}


@pytest.mark.slow
def test_a_file_that_was_renewed(format: Any, bucket: Bucket, file: Path, keys: Keys) -> None:
    """What another program writes into it once the first key has expired counts from the next request on."""
    file.write_text(profile("default", "FIRST"))
    url = f"{bucket.url}/run"
    flax_ckpt_compat.save(url, {"a": 1}, step=1, format=format)
    keys.expired["FIRST"] = lambda: file.write_text(profile("default", "SECOND"))
    keys.clear()
    flax_ckpt_compat.save(url, {"a": 2}, step=2, format=format)
    assert flax_ckpt_compat.restore(url, {"a": 0}) == {"a": 2}
    assert set(keys) == {"FIRST", "SECOND"}


@pytest.mark.slow
def test_variables_that_are_set_anew(bucket: Bucket, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count in the same process, as in a notebook."""
    keys.expired["OLD"] = lambda: None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    with pytest.raises(StorageError, match="credentials, which may be missing or have expired"):
        ours.available_steps(f"{bucket.url}/run")
    assert keys == ["OLD", "OLD"]  # once more, in case that a file was renewed
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")
    assert ours.available_steps(f"{bucket.url}/run") == []


def test_answers_without_a_word(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A HEAD with an expired key is answered HTTP 400 and nothing else, and sent again; so is one elsewhere."""
    store, heads = bucket.proxy.store, list[str]()

    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        if method != "HEAD":
            return store(method, path, headers, body)
        heads.append(path)
        is_refused = len(heads) == 1 or "/run" in path
        return (400, [], b"") if is_refused else store(method, path, headers, body)

    monkeypatch.setattr(bucket.proxy, "store", answer)
    flax_ckpt_compat.save(f"{bucket.url}/renewed", {"a": 1}, format="msgpack")
    assert heads.count(heads[0]) > 1
    with pytest.raises(StorageError, match=r"credentials, which may .* have expired.* AWS_REGION"):
        flax_ckpt_compat.save(f"{bucket.url}/run", {"a": 1}, step=1, format="orbax")
    assert ours.available_steps(f"{bucket.url}/run") == []
