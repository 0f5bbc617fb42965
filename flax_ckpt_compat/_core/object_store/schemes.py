"""List the schemes of object stores that TensorStore reaches, with the words that errors have for each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One scheme of URLs: what does its requests, and what its users set where."""

    name: str
    implementation: str  # module and class of its `StoreScheme`, imported on first use: some take long to load
    bucket_characters: str  # that names of buckets may have
    credentials: str  # how to give them
    endpoint: str
    endpoint_settings: str
    instead_of_settings: str  # what helps, too, where a bucket is elsewhere
    is_401_of_expired: bool  # HTTP 401 is the answer to credentials that have expired, and not only to none
    renews_credentials: bool  # those that have expired may be found anew


_ROOM = "flax_ckpt_compat._core.object_store"
_CHARACTERS = "lower-case letters, digits, dots and hyphens"

SCHEMES = {
    one.name: one
    for one in (
        Scheme(
            "s3",
            f"{_ROOM}.s3.S3",
            bucket_characters=_CHARACTERS,
            credentials="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (for SSO, see `aws configure "
            "export-credentials`)",
            endpoint="the endpoint (AWS_ENDPOINT_URL)",
            endpoint_settings="AWS_REGION and AWS_ENDPOINT_URL",
            instead_of_settings=", or neither, so that the bucket is asked",
            is_401_of_expired=False,
            renews_credentials=True,
        ),
        Scheme(
            "gs",
            f"{_ROOM}.gs.GS",
            bucket_characters=f"{_CHARACTERS}, and underscores",
            credentials="run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
            endpoint="the endpoint",
            endpoint_settings="TENSORSTORE_GCS_HTTP_URL",
            instead_of_settings="",
            is_401_of_expired=True,
            renews_credentials=False,
        ),
    )
}
