"""Manifests and B-tree nodes of OCDBT, byte by byte from the published format, with whatever lies a test wants."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from flax_ckpt_compat.orbax_backend.ocdbt import read_entries

from flax_ckpt_compat._core.location import location_of

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (RFC 3720), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def varint(number: int) -> bytes:
    """Return 7 bits a byte, the lowest first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def column(numbers: Iterable[int]) -> bytes:
    """Return the numbers one after another."""
    return b"".join(map(varint, numbers))


def envelope(magic: int, body: bytes, version: int = 0, compression: int = 0) -> bytes:
    """Return the body with a header before and the checksum behind it."""
    length = 4 + 8 + 2 + len(body) + 4
    data = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + bytes([version, compression]) + body
    return data + crc32c(data).to_bytes(4, "little")


def files(names: Sequence[bytes], bases: Sequence[int] | None = None) -> bytes:
    """Return a table of files; none shares its beginning with another."""
    lengths = list(map(len, names))
    parts = [varint(len(names)), column([0] * (len(names) - 1)), column(lengths), column(bases or [0] * len(names))]
    return b"".join([*parts, *names])


def manifest(offset: int, length: int, height: int = 0, file: bytes = b"d/x") -> bytes:
    """Return a manifest of one version, whose root is a part of a file."""
    settings = bytes(16) + varint(0) + column([1024, 100_000_000]) + b"\x04" + varint(0)
    version = varint(1) + varint(1) + bytes([height]) + column([0, offset, length]) + column([0, 0, 0]) + bytes(8)
    return envelope(MANIFEST, settings + files([file]) + version + varint(0))


def leaf(inside: dict[bytes, bytes], names: Sequence[bytes] = (b"d/x",), **lies: bytes) -> bytes:
    """Return the body of a leaf whose values are inline; ``lies`` stand in for its columns."""
    columns = {
        "height": b"\0",
        "files": files(names),
        "count": varint(len(inside)),
        "shared": column([0] * (len(inside) - 1)),
        "own": column(map(len, inside)),
        "keys": b"".join(inside),
        "lengths": column(map(len, inside.values())),
        "kinds": column([0] * len(inside)),
        "places": b"",
        "values": b"".join(inside.values()),
    }
    return b"".join({**columns, **lies}.values())


def inner(children: dict[bytes, tuple[int, int]], height: int, names: Sequence[bytes] = (b"d/x",)) -> bytes:
    """Return the body of an inner node; its children are parts of the first file."""
    count = len(children)
    return b"".join(
        [bytes([height]), files(names), varint(count), column([0] * (count - 1)), column(map(len, children))]
        + [column([0] * count), b"".join(children), column([0] * count)]
        + [column(place[side] for place in children.values()) for side in (0, 1)]
        + [column([0] * 3 * count)]
    )


def write(path: Path, nodes: Sequence[bytes], height: int = 0, first: bytes | None = None) -> Path:
    """Write a database whose root is the last of the nodes, all in one file; return its directory."""
    (path / "d").mkdir(parents=True, exist_ok=True)
    (path / "d" / "x").write_bytes(b"".join(nodes))
    root = len(nodes[-1])
    whole = sum(map(len, nodes))
    (path / "manifest.ocdbt").write_bytes(first if first is not None else manifest(whole - root, root, height))
    return path


def values(path: Path) -> dict[bytes, bytes]:
    """Return all values that our decoder finds, also those outside of the nodes."""
    return {
        key: value if isinstance(value, bytes) else (path / value.file).read_bytes()[value.offset :][: value.length]
        for key, value in read_entries(location_of(path)).items()
    }
