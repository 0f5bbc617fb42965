"""Delete one version of an object of ``s3://``, through botocore where it is installed (the extra ``s3``).

S3 has deletions with a condition on the ETag since September 2025; TensorStore 0.1.86 sends none. Stores that ignore
the condition delete any version. Where botocore has no credentials or no way to the store, which TensorStore may have,
or the store knows no such condition, the caller deletes without one.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import credentials, retrying
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler

_log = logging.getLogger("flax_ckpt_compat")
_ETAG = b"\0"  # before the ETag in TensorStore's version of an object of s3:// (measured)
_AT_ONCE = 32  # connections, as many as TensorStore's
# A connection that is closed before the answer is common; TensorStore tries again by itself, too.
_RECONNECTIONS, _RECONNECTION_SECONDS = 4, 0.05
_SERVER_FAILED = 500
_NOT_IMPLEMENTED = 501
_TRANSIENT = (408, 409, 429)  # 409: another request for the object is being executed
_OTHER_VERSION = ("NoSuchKey", "PreconditionFailed", "404", "412")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")

_lock = threading.RLock()  # a signal handler may save


class _UnreachableError(OSError):
    """The store cannot be reached; `retrying.retry` tries again, by the text."""


class _Client:
    """botocore's client of one endpoint, and what is known of it."""

    def __init__(self, endpoint: str | None, region: str | None, timeout: float):
        self.endpoint, self.region, self.timeout = endpoint, region, timeout
        self.has_answered = False
        self.is_usable = True

    @functools.cached_property
    def s3(self) -> Any:
        """The client itself, created on first use."""
        from botocore.config import Config
        from botocore.session import get_session

        config = Config(
            connect_timeout=self.timeout,
            read_timeout=self.timeout,
            max_pool_connections=_AT_ONCE,
            retries={"total_max_attempts": 1},  # `retrying.retry` does that
            s3={"addressing_style": "path" if self.endpoint else "auto"},  # as TensorStore does
        )
        verify, session = os.environ.get("TENSORSTORE_CA_BUNDLE"), get_session()
        session.register_component("data_loader", _service_models())
        return session.create_client(
            "s3", region_name=self.region, endpoint_url=self.endpoint, verify=verify, config=config
        )


@functools.cache
def _service_models() -> Any:
    """Return what reads botocore's descriptions of services, each once: they take most of the time of a client."""
    from botocore.loaders import create_loader

    return create_loader()


@functools.cache
def is_installed() -> bool:
    """Return whether botocore is installed."""
    return importlib.util.find_spec("botocore") is not None


def delete_version(url: str, version: bytes, spec: dict[str, Any]) -> bool | None:
    """Delete an object if it has this version, given the spec of its bucket.

    Return whether it had, or None where that cannot be asked."""
    if not version.startswith(_ETAG):
        return None
    etag = version[len(_ETAG) :].decode()
    used: list[_Client] = []

    def send(timeout: float) -> bool | None:
        used.append(_client_of(spec, timeout))
        return _send(used[-1], url, etag) if used[-1].is_usable else None

    try:
        deleted: bool | None = retrying.retry(url, "deleted", lambda: SimpleNamespace(result=send, cancel=bool))
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, (_UnreachableError, TimeoutError)) or any(client.has_answered for client in used):
            raise
        _give_up(used[-1], url, cause)  # its proxy and certificates can differ from TensorStore's
        return None
    return deleted


def _client_of(spec: dict[str, Any], timeout: float) -> _Client:
    with _lock:
        # Another context is made where credentials were refused, and by then a file may have new ones.
        return _client(
            retrying.context(),
            credentials.variables(),
            os.getpid(),
            spec.get("endpoint"),
            spec.get("aws_region"),
            timeout,
        )


@functools.lru_cache(maxsize=4)
def _client(
    context: Any,  # noqa: ARG001  (see `_client_of`)
    variables: tuple[str | None, ...],  # noqa: ARG001
    process: int,  # noqa: ARG001  (after a fork, connections are still the parent's)
    endpoint: str | None,
    region: str | None,
    timeout: float,
) -> _Client:
    return _Client(endpoint, region, timeout)


def _send(client: _Client, url: str, etag: str) -> bool | None:
    from botocore import exceptions

    _, bucket, key = retrying.split(url)
    try:
        with _lock:
            s3 = client.s3
        for number in range(_RECONNECTIONS + 1):
            try:
                s3.delete_object(Bucket=bucket, Key=key, IfMatch=etag)
                break
            except exceptions.ConnectionClosedError:
                if number == _RECONNECTIONS:
                    raise
                time.sleep(_RECONNECTION_SECONDS * (number + 1))
    except exceptions.ClientError as error:
        client.has_answered = True
        return _outcome(client, url, error)
    except (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError) as error:
        raise TimeoutError(str(error)) from error
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        of_handler = error.kwargs.get("error")  # botocore wraps what a signal handler raises meanwhile
        if isinstance(of_handler, Exception) and is_of_handler(of_handler):
            raise of_handler from None
        raise _UnreachableError(f"UNAVAILABLE: {error}") from error
    except exceptions.BotoCoreError as error:  # no credentials, no such profile, a release without the condition
        _give_up(client, url, error)
        return None
    client.has_answered = True
    return True


def _outcome(client: _Client, url: str, error: Any) -> bool | None:
    """Return what an answer other than success means; raise what `retrying.retry` tries again."""
    code, status = error.response["Error"].get("Code", ""), error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
    if code in _OTHER_VERSION:
        return False
    if code in _EXPIRED:
        raise OSError(f"PERMISSION_DENIED: {code}: {error} [http_response_code='{status}']") from error
    if status == _NOT_IMPLEMENTED:
        _give_up(client, url, error)
        return None
    if status >= _SERVER_FAILED or status in _TRANSIENT:
        raise OSError(f"UNAVAILABLE: {error} [http_response_code='{status}']") from error
    _log.info("%s is deleted without a condition: %s", url, error)
    return None


def _give_up(client: _Client, url: str, error: Exception) -> None:
    client.is_usable = False
    _log.info("%s, and what follows, is deleted without a condition: %s", url, error)
