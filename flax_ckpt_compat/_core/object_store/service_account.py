"""Sign requests for tokens with the key of a Google service account, by google-auth where it is installed.

Python's standard library cannot sign with it. It is in the extra ``gcs``.
"""

from __future__ import annotations

import time
from typing import Any

_GRANT = "urn:ietf:params:oauth:grant-type:jwt-bearer"  # RFC 7523
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"  # only lists and metadata are requested
_VALID_FOR = 3600  # s, the most that Google takes


def grant(credentials: dict[str, Any], server: str) -> dict[str, str] | None:
    """Return the fields of a request to the token server, or None for other credentials, or without google-auth.

    Raise ValueError or KeyError if the key is none."""
    if credentials.get("type") != "service_account":
        return None
    try:
        from google.auth import crypt, jwt
    except ImportError:
        return None
    now = int(time.time())
    claims = {"iss": credentials["client_email"], "scope": _SCOPE, "aud": server, "iat": now, "exp": now + _VALID_FOR}
    signer = crypt.RSASigner.from_service_account_info(credentials)
    return {"grant_type": _GRANT, "assertion": jwt.encode(signer, claims).decode()}
