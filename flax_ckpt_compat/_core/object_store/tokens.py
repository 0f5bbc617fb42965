"""The token that TensorStore sends to ``gs://``, where it can be had without signing anything."""

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
_WAIT, _SERVER_WAIT = 10.0, 2.0  # s
_MARGIN = 60.0  # s before its end from which on a token is asked for anew
_NO_TOKEN_FOR = 300.0  # s

_lock = threading.Lock()
_kept: dict[str, tuple[float, str | None]] = {}  # where it came from → until when, and the token


def token() -> str | None:
    """Return the token in the order in which TensorStore looks for one; None where it cannot be known here.

    A key of a service account would have to sign a request, for which Python has no means of its own.
    """
    given = os.environ.get("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    if given:
        return given
    file = _credentials_file()
    with _lock:
        source = file or "metadata"
        until, known = _kept.get(source, (0.0, None))
        if time.monotonic() >= until:
            seconds, known = _of_file(file) if file else _of_machine()
            _kept[source] = time.monotonic() + seconds, known
        return known


def _credentials_file() -> str | None:
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named:
        return named
    folder = os.environ.get("CLOUDSDK_CONFIG") or os.path.expanduser("~/.config/gcloud")
    usual = os.path.join(folder, "application_default_credentials.json")
    return usual if os.path.isfile(usual) else None


def _of_file(file: str) -> tuple[float, str | None]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(file, encoding="utf-8") as opened:
            content = json.load(opened)
        if content.get("type") == "authorized_user":
            fields = {name: content[name] for name in ("client_id", "client_secret", "refresh_token")}
            body = urllib.parse.urlencode(fields | {"grant_type": "refresh_token"}).encode()
            return _asked(urllib.request.Request(content.get("token_uri") or _TOKEN_URL, body), _WAIT)  # noqa: S310
    return _NO_TOKEN_FOR, None


def _of_machine() -> tuple[float, str | None]:
    server = os.environ.get("GCE_METADATA_ROOT") or "metadata.google.internal"
    with suppress(OSError, ValueError, KeyError, TypeError):
        request = urllib.request.Request(f"http://{server}/{_METADATA}", headers={"Metadata-Flavor": "Google"})
        return _asked(request, _SERVER_WAIT)
    return _NO_TOKEN_FOR, None


def _asked(request: urllib.request.Request, timeout: float) -> tuple[float, str | None]:
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        found: dict[str, Any] = json.loads(answer.read())
    return max(0.0, float(found.get("expires_in", 0)) - _MARGIN), str(found["access_token"])
