"""Get the OAuth token that TensorStore sends to ``gs://``, where that needs no signature."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from typing import Any

_TOKEN_URL = "https://oauth2.googleapis.com/token"  # noqa: S105
_METADATA = "computeMetadata/v1/instance/service-accounts/default/token"
_TIMEOUT, _METADATA_TIMEOUT = 10.0, 2.0  # s
_MARGIN = 60.0  # s before expiry at which a token is renewed
_NO_TOKEN_FOR = 300.0  # s that a failure is cached for

_lock = threading.Lock()
_cache: dict[str, tuple[float, str | None]] = {}  # source → expiry, token


def token() -> str | None:
    """Return the token that TensorStore would find, or None if it cannot be known here.

    The key of a service account would have to sign a request, which Python's standard library cannot.
    """
    given = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    if given:
        return given
    file = _credentials_file()
    with _lock:
        source = file or "metadata"
        until, known = _cache.get(source, (0.0, None))
        if time.monotonic() >= until:
            seconds, known = _from_file(file) if file else _from_metadata_server()
            _cache[source] = time.monotonic() + seconds, known
        return known


def _credentials_file() -> str | None:
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        return named
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    usual = os.path.join(folder, "application_default_credentials.json")
    return usual if os.path.isfile(usual) else None


def _from_file(file: str) -> tuple[float, str | None]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(file, encoding="utf-8") as opened:
            content = json.load(opened)
        if content.get("type") == "authorized_user":
            fields = {name: content[name] for name in ("client_id", "client_secret", "refresh_token")}
            body = urllib.parse.urlencode(fields | {"grant_type": "refresh_token"}).encode()
            return _request_token(urllib.request.Request(content.get("token_uri") or _TOKEN_URL, body), _TIMEOUT)  # noqa: S310
    return _NO_TOKEN_FOR, None


def _from_metadata_server() -> tuple[float, str | None]:
    server = os.environ.get("GCE_METADATA_ROOT") or "metadata.google.internal"
    with suppress(OSError, ValueError, KeyError, TypeError):
        request = urllib.request.Request(f"http://{server}/{_METADATA}", headers={"Metadata-Flavor": "Google"})
        return _request_token(request, _METADATA_TIMEOUT)
    return _NO_TOKEN_FOR, None


def _request_token(request: urllib.request.Request, timeout: float) -> tuple[float, str | None]:
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        found: dict[str, Any] = json.loads(answer.read())
    return max(0.0, float(found.get("expires_in", 0)) - _MARGIN), str(found["access_token"])
