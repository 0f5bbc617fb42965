"""Send what TensorStore cannot ask of ``s3://``, through botocore where it is installed (the extra ``s3``).

botocore may have no credentials, or no way to the store, where TensorStore has both: its proxy and certificates can
differ. Then, and where the store knows no such request, `NotPossibleError` says that there is another way to go.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.object_store import credentials, retrying
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler

_ETAG = b"\0"  # before the ETag in TensorStore's version of an object of s3:// (measured)
_AT_ONCE = 32  # connections, as many as TensorStore's
# A connection that is closed before the answer is common; TensorStore tries again by itself, too.
_RECONNECTIONS, _RECONNECTION_SECONDS = 4, 0.05
_SERVER_FAILED = 500
_NOT_IMPLEMENTED = 501
_TRANSIENT = (408, 409, 429)  # 409: another request for the object is being executed
# Codes of a condition that does not hold: another version is there, or none.
OTHER_VERSION = ("NoSuchKey", "PreconditionFailed", "404", "412")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")

_lock = threading.RLock()  # a signal handler may save


class NotPossibleError(Exception):
    """botocore cannot ask the store; the text says why, and is empty once that was said."""


class RefusedError(Exception):
    """The store answered with an error that another try would not change.

    Attributes:
        code: S3's name of it, or the status as text.
    """

    def __init__(self, error: Any):
        super().__init__(str(error))
        self.code: str = error.response["Error"].get("Code", "")


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
            # As TensorStore: addresses, and the SHA-256 of what is sent, which the store compares. Checksums of later
            # releases are not known to all stores.
            s3={"addressing_style": "path" if self.endpoint else "auto", "payload_signing_enabled": True},
            request_checksum_calculation="when_required",
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


def etag_of(version: bytes) -> str | None:
    """Return the ETag in TensorStore's version of an object, or None if it has none."""
    return version[len(_ETAG) :].decode() if version.startswith(_ETAG) else None


def send(
    url: str,
    operation: str,
    spec: dict[str, Any],
    request: Callable[[Any, str, str], Any],
    nbytes: int = 0,
) -> Any:
    """Return what a request about an object returns, which is called with botocore's client, bucket and key.

    ``spec`` is that of the bucket; ``operation`` and ``nbytes`` are as for `retrying.retry`. Raise `NotPossibleError`,
    `RefusedError`, or StorageError if the store failed."""
    used: list[_Client] = []

    def start(timeout: float) -> Any:
        used.append(_client_of(spec, timeout))
        if not used[-1].is_usable:
            raise NotPossibleError
        return _send(used[-1], url, request)

    try:
        return retrying.retry(url, operation, lambda: SimpleNamespace(result=start, cancel=bool), nbytes)
    except StorageError as error:
        cause = error.__cause__
        if not isinstance(cause, (_UnreachableError, TimeoutError)) or any(client.has_answered for client in used):
            raise
        raise _not_possible(used[-1], cause) from error


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


@functools.lru_cache(maxsize=8)
def _client(
    context: Any,  # noqa: ARG001  (see `_client_of`)
    variables: tuple[str | None, ...],  # noqa: ARG001
    process: int,  # noqa: ARG001  (after a fork, connections are still the parent's)
    endpoint: str | None,
    region: str | None,
    timeout: float,
) -> _Client:
    return _Client(endpoint, region, timeout)


def _send(client: _Client, url: str, request: Callable[[Any, str, str], Any]) -> Any:
    from botocore import exceptions

    _, bucket, key = retrying.split(url)
    try:
        with _lock:
            s3 = client.s3
        for number in range(_RECONNECTIONS + 1):
            try:
                answer = request(s3, bucket, key)
                break
            except exceptions.ConnectionClosedError:
                if number == _RECONNECTIONS:
                    raise
                time.sleep(_RECONNECTION_SECONDS * (number + 1))
    except exceptions.ClientError as error:
        client.has_answered = True
        raise _failure(client, error) from error
    except (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError) as error:
        raise TimeoutError(str(error)) from error
    except (exceptions.HTTPClientError, exceptions.ConnectionError) as error:
        of_handler = error.kwargs.get("error")  # botocore wraps what a signal handler raises meanwhile
        if isinstance(of_handler, Exception) and is_of_handler(of_handler):
            raise of_handler from None
        raise _UnreachableError(f"UNAVAILABLE: {error}") from error
    except exceptions.BotoCoreError as error:  # no credentials, no such profile, a release without the parameter
        raise _not_possible(client, error) from error
    client.has_answered = True
    return answer


def _failure(client: _Client, error: Any) -> Exception:
    """Return what an answer other than success means; an OSError is what `retrying.retry` tries again."""
    code, status = error.response["Error"].get("Code", ""), error.response["ResponseMetadata"].get("HTTPStatusCode", 0)
    if code in _EXPIRED:
        return OSError(f"PERMISSION_DENIED: {code}: {error} [http_response_code='{status}']")
    if status == _NOT_IMPLEMENTED:
        return _not_possible(client, error)
    if status >= _SERVER_FAILED or status in _TRANSIENT:
        return OSError(f"UNAVAILABLE: {error} [http_response_code='{status}']")
    return RefusedError(error)


def _not_possible(client: _Client, error: BaseException) -> NotPossibleError:
    client.is_usable = False
    return NotPossibleError(str(error))
