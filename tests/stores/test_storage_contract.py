"""What every storage promises, whichever it is; expected values come from `os` and the stores' own clients."""

import errno
import os
from pathlib import Path

import pytest

from flax_ckpt_compat._core import checksums
from flax_ckpt_compat._core import orbax_layout as layout
from flax_ckpt_compat._core.errors import ArgumentError, ConcurrentWriteError, MissingPathError, StorageError
from flax_ckpt_compat._core.local import temporaries
from flax_ckpt_compat._core.local.syncing import write_file
from flax_ckpt_compat._core.location import Location, location_of
from flax_ckpt_compat._core.object_store import commit as uploads
from flax_ckpt_compat._core.storage import Listing, Stat
from tests.support.peers import version
from tests.support.store_places import Place

CONTENTS = {"a": b"", "b": b"\x07", "c/d": b"12", "c/e/f": bytes(range(256)) * 3, "c.x": b"x", "c0": b"y"}
ABSENT = "none"


FIXTURES = {"s3": "bucket", "gs": "gs_bucket", "az": "az_bucket", "shelf": "shelf"}


@pytest.fixture(params=["disk", "s3", "gs", pytest.param("az", marks=pytest.mark.slow), "shelf"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A folder that does not exist yet, of each storage."""
    if request.param == "disk":
        return Place(str(tmp_path / "run"), folder=tmp_path / "run")
    if version("tensorstore") < (0, 1, 86):
        pytest.skip("this TensorStore does not read parts of objects")
    bucket = request.getfixturevalue(FIXTURES[request.param])
    return Place(f"{bucket.url}/run", bucket=bucket)


@pytest.fixture
def filled(place: Place) -> Place:
    """A folder with files."""
    for name, content in CONTENTS.items():
        place.put(name, content)
    return place


@pytest.fixture
def root(place: Place) -> Location:
    """The location of a folder without files, which is made where the storage has folders."""
    found = location_of(place.root)
    found.prepare_directory()
    return found


@pytest.fixture(params=["unlisted", "listed"])
def location(request: pytest.FixtureRequest, filled: Place) -> Location:
    """The location of a folder with files, as it is, and with a listing."""
    found = location_of(filled.root)
    return found.listed() if request.param == "listed" else found


class TestLocation:
    """Where things are: made once, and handed down."""

    def test_door(self, place: Place) -> None:
        """Text, path objects and locations are taken; anything else is refused with what was found."""
        found = location_of(place.root)
        assert found.path == str(found) == place.root
        assert location_of(f"{place.root}/x/../") == found == location_of(found)
        assert found.is_remote == (place.bucket is not None)
        if place.folder is not None:
            assert location_of(place.folder) == found == location_of(f"file://{place.folder}")
        with pytest.raises(ArgumentError, match=r"a directory is text or a path object, found int; pass"):
            location_of(3, "directory")
        with pytest.raises(StorageError, match="pathlib"):
            location_of("s3:/bucket/x")

    def test_names(self, place: Place) -> None:
        """They are those of the path; two locations are equal if their paths are."""
        found = location_of(place.root)
        assert (found / "x" / "y/z").path == f"{place.root}/x/y/z"
        assert (found / "x").name == "x" and (found / "x").parent == found
        assert found / "" == found
        assert (found / "x").sibling("_gda") == found / "x_gda"
        assert {found, found.with_listing(Listing(found.path, {}))} == {found}
        assert type(found.at("other")) is type(found) and repr(found).endswith(f"Location(path={found.path!r})")

    def test_listing_is_handed_down(self, filled: Place) -> None:
        """One listing serves all below a folder; without it, look-ups ask again."""
        location = location_of(filled.root).listed()
        inner = location / "c"
        assert inner.listed() is inner and inner.parent.listing is location.listing
        assert inner.isdir() and not (inner / "d").isdir() and sorted(inner.listdir()) == ["d", "e"]
        filled.put("c/new", b"1")
        assert ("new" in inner.listdir()) == (not location.is_remote)
        assert "new" in inner.unlisted().listdir() and inner.unlisted().listing is None


class TestStorage:
    """Every method, of every storage."""

    def test_kinds(self, location: Location) -> None:
        """A folder, a file, and nothing; names that only begin alike are others."""
        for name in ("", "c", "c/e"):
            there = location / name
            assert (there.isdir(), there.isfile(), there.exists()) == (True, False, True)
        for name in CONTENTS:
            there = location / name
            assert (there.isdir(), there.isfile(), there.exists()) == (False, True, True)
        for name in (ABSENT, "c/none/x", "c/", "b/x", "c/e/"):
            if name[-1] != "/":
                there = location / name
                assert (there.isdir(), there.isfile(), there.exists()) == (False, False, False)

    def test_names_in_a_folder(self, location: Location) -> None:
        """What is directly in it; a missing one is an error."""
        assert sorted(location.listdir()) == sorted({name.partition("/")[0] for name in CONTENTS})
        assert sorted((location / "c").listdir()) == ["d", "e"]
        assert sorted(location.files_below()) == sorted(CONTENTS)
        assert sorted((location / "c").files_below()) == ["d", "e/f"]
        assert (location / ABSENT).files_below() == []
        for name in (ABSENT, "b"):
            with pytest.raises(MissingPathError) as caught:
                (location / name).listdir()
            assert caught.value.path == (location / name).path
            assert isinstance(caught.value, FileNotFoundError)

    def test_bytes_of_files(self, location: Location) -> None:
        """Sizes, and any part, are those of the content."""
        for name, content in CONTENTS.items():
            file = location / name
            assert (file.size(), file.head(), file.total_size()) == (len(content), content[:32], len(content))
            assert file.read() == content
            for start, stop in ((0, 1), (1, 3), (0, 10_000), (300, 600), (5, 5), (2_000, 2_001)):
                assert file.read(start, stop) == content[start:stop]
            opened = file.open_file()
            assert opened.size == len(content)
            assert opened.read(1, 5_000) == content[1:]
        assert location.total_size() == sum(map(len, CONTENTS.values()))
        assert (location / ABSENT).total_size() == 0
        for ask in ("size", "head", "read", "open_file"):
            with pytest.raises(MissingPathError) as caught:
                getattr(location / ABSENT, ask)()
            assert caught.value.path == (location / ABSENT).path

    def test_many_are_asked_for_at_once(self, filled: Place) -> None:
        """What was asked for ahead is kept in the listing alone."""
        location = location_of(filled.root).listed()
        location.prefetch([*CONTENTS, ABSENT, "c"], heads=True)
        location.prefetch(CONTENTS)
        found = {name: ((location / name).head(), (location / name).size()) for name in CONTENTS}
        assert found == {name: (content[:32], len(content)) for name, content in CONTENTS.items()}
        assert {name: (location / name).read() for name in CONTENTS} == CONTENTS
        filled.put("b", b"others")
        assert (location / "b").read() == (CONTENTS["b"] if location.is_remote else b"others")
        assert (location.unlisted() / "b").read() == b"others"

    def test_the_size_of_a_folder_beside_an_object(self, filled: Place) -> None:
        """In a store, where an empty object may have its name."""
        if filled.bucket is not None and filled.bucket.url.partition(":")[0] in ("s3", "gs", "az"):
            filled.put("c", b"")
        folder = location_of(filled.root) / "c"
        assert folder.total_size() == folder.listed().total_size() == len(CONTENTS["c/d"]) + len(CONTENTS["c/e/f"])

    def test_what_the_system_refuses(self, tmp_path: Path) -> None:
        """Every look-up of a disk raises a StorageError that has the path and the number, as stores do."""
        location = location_of(tmp_path / "loop")
        (tmp_path / "loop").symlink_to("loop")
        for ask in ("listdir", "size", "head", "read", "open_file"):
            with pytest.raises(StorageError) as caught:
                getattr(location, ask)()
            assert (caught.value.path, caught.value.errno in (errno.ELOOP, errno.ENOENT)) == (location.path, True)

    def test_an_open_file_is_one_version(self, filled: Place) -> None:
        """What replaces it is never mixed in: the old bytes, or an error."""
        large = bytes(range(256)) * 1000
        filled.put("large", large)
        opened = (location_of(filled.root) / "large").open_file()
        if filled.folder is not None:
            (filled.folder / "other").write_bytes(large[::-1])
            os.replace(filled.folder / "other", filled.folder / "large")
            assert opened.read(200_000, 200_010) == large[200_000:200_010]
        else:
            filled.put("large", large[::-1])
            with pytest.raises(StorageError, match="was replaced or removed since it was opened"):
                opened.read(200_000, 200_010)

    def test_limits(self, place: Place) -> None:
        """Names that are too long for a disk are known as such; a store decides itself."""
        location = location_of(place.root)
        assert location.why_too_long() is None
        assert ((location / ("x" * 2000)).why_too_long() is None) == location.is_remote

    def test_links(self, filled: Place) -> None:
        """A link is resolved; one that leads nowhere exists. Stores have none."""
        location = location_of(filled.root)
        if filled.folder is None:
            assert location.resolve() == location.path and location.identity() is None
            assert location.restore_set_aside([".c_1"]) == []
            return
        (filled.folder / "link").symlink_to("c")
        (filled.folder / "dangling").symlink_to("nowhere")
        assert (location / "link").resolve() == os.path.realpath(filled.folder / "c")
        assert (location / "dangling").exists() and not (location / "dangling").isfile()
        status = os.stat(filled.folder)
        assert location.identity() == (status.st_dev, status.st_ino, status.st_ctime_ns)

    def test_checksums_of_the_store(self, filled: Place) -> None:
        """A disk tells none, nor does s3://; that of gs:// is the CRC-32C."""
        found = (location_of(filled.root) / "c/d").open_file().crc32c
        assert found == (checksums.crc32c(b"12") if filled.root.startswith("gs://") else None)


def write(temporary: str, contents: dict[str, bytes]) -> None:
    """Write a local file, of the name "", or a directory of files."""
    if "" not in contents:
        temporaries.create_directory(temporary)
    for name, content in contents.items():
        file = os.path.join(temporary, name) if name else temporary
        os.makedirs(os.path.dirname(file), exist_ok=True)
        write_file(file, content)


FILE, FOLDER = {"": b"\x81\xa1a\x01"}, {"_METADATA": b"{}", "d/0123456789abcdef0123456789abcdef": bytes(1000)}


def commit(target: Location, contents: dict[str, bytes], *, new: bool = False) -> None:
    """Publish a checkpoint."""
    with target.temporary() as temporary:
        write(temporary, contents)
        target.publish(temporary, new=new)
    assert not os.path.exists(temporary)


def published(place: Place, name: str) -> dict[str, bytes]:
    """The files of a checkpoint, but for the one that says that it is complete."""
    inside = {key: content for key, content in place.contents().items() if key == name or key.startswith(f"{name}/")}
    found = {key[len(name) + 1 :]: content for key, content in inside.items()}
    assert place.bucket is None or "" in found or layout.COMMIT_FILE in found
    return {key: content for key, content in found.items() if key != layout.COMMIT_FILE}


class TestCommits:
    """Checkpoints come and go as a whole."""

    @pytest.mark.parametrize("contents", [FILE, FOLDER], ids=["file", "folder"])
    def test_publish_and_discard(self, place: Place, root: Location, contents: dict[str, bytes]) -> None:
        """All of it is there, and nothing else; then nothing of it."""
        for step in (1, 2):
            commit(root / f"c_{step}", contents, new=True)
        assert place.names() == ["c_1", "c_2"] and published(place, "c_1") == contents
        assert not (root / "c_1").holds_nothing()
        names = (root / "c_1").listdir() if "" not in contents else []
        assert not names or (root / "c_1").why_unfinished(names) is None
        assert root.discard(["c_1"]) == {}
        assert place.names() == ["c_2"] and published(place, "c_2") == contents

    @pytest.mark.parametrize("contents", [FILE, FOLDER], ids=["file", "folder"])
    def test_replace(self, place: Place, root: Location, contents: dict[str, bytes]) -> None:
        """What is there is replaced whole, whatever it was; with ``new`` one of the same kind stays."""
        target = root / "c_1"
        for before in (FILE, FOLDER):
            commit(target, before)
            commit(target, contents)
            assert published(place, "c_1") == contents and place.names() == ["c_1"]
            with pytest.raises(StorageError):
                commit(target, {name: content + b"2" for name, content in contents.items()}, new=True)
            assert published(place, "c_1") == contents and place.names() == ["c_1"]

    def test_a_replacement_is_noticed(self, place: Place, root: Location) -> None:
        """By who watches since before, with a listing or without one."""
        target = root / "c_1"
        for data in ("0" * 32, "1" * 32):
            watches = [target.watch(), target.listed().watch(), root.listed().at(target.path).watch()]
            assert not any(is_replaced() for is_replaced in watches) or data == "0" * 32
            commit(target, {"_METADATA": b"{}", f"d/{data}": b"x"})
            assert [is_replaced() for is_replaced in watches] == [data == "1" * 32] * 3

    def test_a_failure_leaves_nothing(self, place: Place, root: Location) -> None:
        """Neither under the name, nor the temporary."""
        with pytest.raises(RuntimeError), (root / "c").temporary() as temporary:
            write(temporary, FOLDER)
            raise RuntimeError
        assert not os.path.exists(temporary) and place.names() == []

    def test_what_holds_nothing(self, place: Place, root: Location) -> None:
        """An empty file may be replaced; a folder with a file may not."""
        place.put("empty", b"")
        place.put("full/x", b"")
        for location in (root, root.listed()):
            found = [(location / name).holds_nothing() for name in ("empty", "full")]
            assert found == [True, False]

    def test_two_writers(self, place: Place, root: Location) -> None:
        """Of two that publish a new file under one name, one does, and the other hears of it."""
        target, failures = root / "c", 0
        with target.temporary() as first, target.temporary() as second:
            for number, temporary in enumerate((first, second)):
                write(temporary, {"": bytes([number])})
            for temporary in (first, second):
                try:
                    target.publish(temporary, new=True)
                except (ConcurrentWriteError, StorageError):
                    failures += 1
                    os.unlink(temporary)
        assert failures == 1 and place.contents() == {"c": b"\0"}

    def test_leftovers(self, place: Place, root: Location) -> None:
        """What dead writers left is named, and goes; what is complete stays."""
        commit(root / "c_1", FOLDER)
        if place.folder is None:
            left = "c_2"
            place.put(f"{left}/{layout.BEGUN}.1.{'0' * 32}", b"")  # of 1970
            place.put(f"{left}/_METADATA", b"{}")
            assert (root / left).holds_nothing() and (root / left).why_unfinished((root / left).listdir())
            assert root.leftovers() == {left: True}
            root.leftovers(remove=["c_1"])
            assert sorted(place.names()) == sorted(["c_1", left])
            root.leftovers(remove=[left])
        else:
            place.put(f"{os.path.basename((root / 'c_2').temporary_path())}/x", b"1")
            root.prepare_directory()
        assert place.names() == ["c_1"] and root.leftovers() == {}

    @pytest.mark.parametrize("joined", [False, True])
    def test_uploads_of_several_processes(self, place: Place, root: Location, joined: bool, tmp_path: Path) -> None:
        """Nothing is to be seen before the commit, or after the end of a save that failed; then all of it."""
        target = root / "c_1"
        if root.path.startswith("shelf://"):
            with pytest.raises(StorageError, match="several processes cannot save"):
                uploads.Upload(target.path).begin()
            return
        if not root.is_remote:
            return
        begun = uploads.Upload(target.path)
        begun.begin()
        upload = uploads.Upload(begun.url, begun.folder, begun.marker) if joined else begun
        part = f"d{upload.tag}/x"
        write(str(tmp_path / "here"), {part: b"1", f"d{upload.tag}/last": b"2"})
        upload.send(str(tmp_path / "here"), [part, f"d{upload.tag}/last"])
        upload.write(f"d{upload.tag}/y", b"3")
        assert sorted(upload.written()) == sorted(f"d{upload.tag}/{name}" for name in ("last", "x", "y"))
        assert target.holds_nothing()
        if joined:
            upload.abort()
            assert place.contents() == {}
            with pytest.raises(ConcurrentWriteError):
                upload.check_active()
            return
        staged = target.temporary_path()
        write(staged, {"_METADATA": b"{}"})
        upload.publish(staged, new=True)
        assert published(place, "c_1") == {
            "_METADATA": b"{}", part: b"1", f"d{upload.tag}/last": b"2", f"d{upload.tag}/y": b"3"
        }  # fmt: skip


KEYS = ["a", "a-", "a.b", "a/b", "a/b/c d", "a/ü", "a0", "b/%2F+&?", "c"]


@pytest.mark.parametrize("folder", ["", "a", "a/b", "b", "c", "none"])
def test_a_listing_is_its_keys(folder: str) -> None:
    """Below a folder is what begins with its name and a slash."""
    listing = Listing("s3://x/run", {key: Stat(1, key) for key in KEYS})
    url = f"s3://x/run/{folder}".rstrip("/")
    prefix = f"{folder}/" if folder else ""
    expected = [key.removeprefix(prefix) for key in sorted(KEYS) if key.startswith(prefix)]
    assert list(listing.below(url) or ()) == expected
    assert (listing.file(url) is not None) == (folder in KEYS)
    assert listing.below("s3://x/runs") is None and listing.file("s3://x/runs") is None
