"""An az:// store on loopback: Azurite of Microsoft, behind a proxy that notes requests."""

import dataclasses
import functools
import importlib.util
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from tests.support import servers
from tests.support.gs import forward
from tests.support.s3 import Folders, Proxy

# Azurite's own account, documented.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def why_not() -> str | None:
    """Why the store cannot run here; None where it can."""
    if importlib.util.find_spec("adlfs") is None:
        return "adlfs is not installed (extra 'az')"
    return None if shutil.which("azurite-blob") else "Azurite is not installed (npm install -g azurite)"


class AzProxy(Proxy):
    """The proxy before a server.

    Attributes:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        super().__init__(functools.partial(forward, port))


@dataclasses.dataclass(frozen=True)
class AzBucket(Folders):
    """An empty container for one test; the same methods as `tests.support.s3.Bucket`, by Microsoft's own client.

    Attributes:
        name: of the container.
        proxy: that all requests of the library pass.
        client: of the container, past the proxy.
    """

    name: str
    proxy: Proxy
    client: Any = dataclasses.field(repr=False)

    @property
    def url(self) -> str:
        """Of the container."""
        return f"az://{self.name}"

    def keys(self, prefix: str = "") -> list[str]:
        """Of all blobs."""
        return sorted(self.client.list_blob_names(name_starts_with=prefix))

    def get(self, key: str) -> bytes:
        """A blob's content."""
        return bytes(self.client.download_blob(key).readall())

    def put(self, key: str, content: bytes) -> None:
        """Writes a blob."""
        self.client.upload_blob(key, content, overwrite=True)

    def delete(self, key: str) -> None:
        """Deletes a blob."""
        self.client.delete_blob(key)


def connection(url: str) -> str:
    """The connection string for a server at a URL."""
    return f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={url}/{_ACCOUNT};"


@contextmanager
def serving() -> Iterator[AzProxy]:
    """A new store behind a proxy."""
    port = servers.free_port()
    command = ["azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    with servers.serving(command, port, stdin=subprocess.DEVNULL), closing(AzProxy(port)) as proxy:
        yield proxy


def new_bucket(proxy: AzProxy) -> AzBucket:
    """A container with a name of its own."""
    from azure.storage.blob import ContainerClient

    name = f"b-{uuid.uuid4().hex[:12]}"
    client = ContainerClient.from_connection_string(connection(f"http://127.0.0.1:{proxy.port}"), name)
    client.create_container()
    return AzBucket(name, proxy, client)


def environment(proxy: AzProxy) -> dict[str, str]:
    """The variables that lead the library, and its subprocesses, to the proxy."""
    return {"AZURE_STORAGE_CONNECTION_STRING": connection(proxy.url)}
