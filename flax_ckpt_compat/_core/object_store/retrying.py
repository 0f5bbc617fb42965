"""Send requests to object stores through TensorStore, loaded on first use, and retry them.

What differs between the schemes is in the modules `s3` and `gs`.

Requests are retried in two layers: by TensorStore itself (`_RETRIES`), and by `retry`, if the error is one that
`request_errors.is_transient` accepts: a timeout or a code such as UNAVAILABLE, but not that TensorStore's retries ran
out. `gs` sends its requests to the JSON API through `retry` alone; 408, 429 and 5xx become its `_TransientError`.
Where the credentials of ``s3://`` have expired, a request is sent once more, with those that are there by then.
"""

from __future__ import annotations

import functools
import logging
import posixpath
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flax_ckpt_compat._core.errors import StorageError
from flax_ckpt_compat._core.load_tensorstore import load_tensorstore, use_tensorstore
from flax_ckpt_compat._core.object_store import credentials, request_errors, request_timeouts
from flax_ckpt_compat._core.object_store.schemes import SCHEMES
from flax_ckpt_compat._core.signal_handler_errors import is_of_handler
from flax_ckpt_compat._core.storage_errors import TENSORSTORE_ERRORS

_log = logging.getLogger("flax_ckpt_compat")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9.+-]*)://([^/]*)(.*)", re.DOTALL)
_REFUSED = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
_RETRIES = {"max_retries": 10, "initial_delay": "100ms", "max_delay": "4s"}  # some 25 s in all
_ATTEMPTS = 4
_FIRST_PAUSE = 0.2  # s
_TIMEOUT = 30.0  # s for one attempt, beside the time that its bytes may take; see `request_timeouts`
_MIN_RATE = 2**20  # bytes/s
# Requests, as many as TensorStore's default; where it is stated, a context does not share them with others.
_AT_ONCE = {"limit": 32}


def split(url: str) -> tuple[str, str, str]:
    """Split a URL into scheme, bucket and key; the key may be empty, and is not normalized."""
    match = _URL.fullmatch(url)
    scheme = match[1].lower() if match else ""
    if match is None or scheme not in SCHEMES:
        known = (
            "s3://, gs://, az:// and hf:// URLs, those of path classes that are registered with epath, and local paths"
        )
        raise StorageError(f"{url}: the scheme {scheme + '://'!r} is unknown; {known} can be used", path=url)
    if not match[2]:
        raise StorageError(f"{url} names no bucket; write {scheme}://bucket/folder", path=url)
    return scheme, match[2], match[3].removeprefix("/")


def normal(url: str) -> str:
    """Normalize a user's URL: resolve ``.`` and ``..``, and remove redundant slashes."""
    scheme, bucket, key = split(url)
    if found := _REFUSED.search(url):
        message = f"{url!a} has the character {found[0]!a}, with which stores take no name, or change it; leave it out"
        raise StorageError(message, path=url)
    return f"{scheme}://{bucket}{posixpath.normpath('/' + key.lstrip('/'))}".rstrip("/")


def key_of(url: str) -> str:
    """Return the key of a URL."""
    return split(url)[2]


def context() -> Any:
    """Return the TensorStore context that all requests share."""
    return _context(credentials.variables())


@functools.lru_cache(maxsize=1)
def _context(variables: tuple[str | None, ...]) -> Any:  # noqa: ARG001  (with other ones it is another context)
    ts = load_tensorstore()  # heavy, and needed for stores alone

    if "byte_range" not in (ts.KvStore.read.__doc__ or ""):
        raise StorageError(
            "object stores need a newer TensorStore, which reads parts of objects (0.1.86 does); "
            "pip install -U tensorstore"
        )
    retries = {"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES}
    at_once = {"s3_request_concurrency": _AT_ONCE, "gcs_request_concurrency": _AT_ONCE}
    return ts.Context({**retries, **at_once, "aws_credentials": credentials.aws_credentials()})


def renew_context() -> None:
    """Make later requests in a new context."""
    _context.cache_clear()
    open_bucket.cache_clear()


@contextmanager
def replaced_context_after_failure() -> Iterator[None]:
    """After a timeout or a refusal, make requests in a new context.

    A request that gets no answer keeps its place among those at once, also when cancelled: 32 of them, and nothing is
    sent any more. Files with credentials are read once for each context (TensorStore 0.1.86, measured).
    """
    try:
        yield
    except TENSORSTORE_ERRORS as error:
        if isinstance(error, TimeoutError) or request_errors.is_refusal(error):
            renew_context()
        raise


@functools.lru_cache(maxsize=64)
def open_bucket(items: tuple[tuple[str, Any], ...], context: Any) -> Any:
    """Open a bucket, by the items of its spec, as a TensorStore ``KvStore``."""
    return load_tensorstore().KvStore.open(dict(items), context=context).result()


def retry(url: str, operation: str, request: Callable[[], Any], nbytes: int = 0, *, at_most: int = 0) -> Any:
    """Run an idempotent request, retried a few times with growing pauses; return its result.

    ``request`` starts it and returns TensorStore's future, ``operation`` completes "could not be …", and ``nbytes`` to
    transfer, or ``at_most`` so many where the number is not known, extend the timeout."""
    use_tensorstore(url)
    was_expired = False
    for trial in range(_ATTEMPTS):
        future = None
        try:
            with replaced_context_after_failure():
                future = request()
                return request_timeouts.wait(future, nbytes, _TIMEOUT + at_most / _MIN_RATE, _MIN_RATE)
        except BaseException as error:
            if future is not None:
                future.cancel()  # else it might still take effect, after later requests
            if not isinstance(error, TENSORSTORE_ERRORS) or is_of_handler(error):  # such as Ctrl-C
                raise
            renewable = (
                not was_expired and SCHEMES[split(url)[0]].renews_credentials and request_errors.has_expired(error)
            )
            was_expired |= renewable
            is_last = trial + 1 == _ATTEMPTS or isinstance(error, request_timeouts.SlowNetworkError)
            if is_last or not (renewable or request_errors.is_transient(error)):
                raise request_errors.translate_error(url, operation, error) from error
            pause = _FIRST_PAUSE * 2**trial * random.uniform(0.5, 1)  # noqa: S311  (spreads out those that wait)
            _log.info("%s could not be %s, trying again in %.1f s: %s", url, operation, pause, error)
            time.sleep(pause)
    raise AssertionError
