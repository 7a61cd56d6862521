"""Folders behind a URL, on real file systems of fsspec."""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from verl_profiling.afterwards.uploads import remove_empty
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.remote import RemoteFolder, is_url


@pytest.fixture(params=["file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteFolder:
    """A folder that does not exist yet."""
    return RemoteFolder(f"{request.param}://{tmp_path}/store/run/")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://b/r", True),
        ("simplecache::s3://b/r", True),
        ("memory://x", True),
        ("/a/b", False),
        ("a://b"[1:], False),
        ("C:/b", False),
        ("outputs/a:b", False),
    ],
)
def test_urls_are_told_from_paths(path: str, expected: bool) -> None:
    """By their scheme."""
    assert is_url(path) is expected


def test_files_and_folders_arrive(folder: RemoteFolder, tmp_path: Path) -> None:
    """With all that is inside."""
    (tmp_path / "npu" / "deep").mkdir(parents=True)
    (tmp_path / "npu" / "deep" / "a.json").write_text("[1]")
    (tmp_path / "one").write_bytes(b"\0" * 100_000)
    assert folder.names() == set()
    folder.put(tmp_path / "npu", "actor_rank0.npu")
    folder.put(tmp_path / "one", "one")
    assert folder.names() == {"actor_rank0.npu", "one"}
    assert folder.read("actor_rank0.npu/deep/a.json") == b"[1]"
    assert len(folder.read("one")) == 100_000


def test_one_of_two_creates(folder: RemoteFolder) -> None:
    """The second is told so, and changes nothing."""
    assert folder.create("run.json", b"mine")
    assert not folder.create("run.json", b"other")
    assert folder.read("run.json") == b"mine"


def test_a_chain_of_urls_is_refused() -> None:
    """What is written through a cache, for one, is nobody's to verify."""
    with pytest.raises(ToolUnavailableError, match="chain of URLs"):
        RemoteFolder("simplecache::memory://x")


def test_a_thread_takes_its_file_system_with_it(tmp_path: Path) -> None:
    """A run of a month has thousands of threads, and each would leave its connections behind."""
    import gc
    import threading
    import weakref

    left: list[weakref.ref[Any]] = []
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: left.append(weakref.ref(RemoteFolder(f"file://{tmp_path}")._fs))
        )
        thread.start()
        thread.join()
    gc.collect()
    assert [reference() for reference in left] == [None] * 3


class Summing(LocalFileSystem):
    """A store that says the MD5 of what it holds, as Google's does; one byte may rot on the way."""

    protocol = "summing"
    puts: list[str] = []
    rots = False

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        """Put a file."""
        self.puts.append(rpath)
        super().put_file(lpath, rpath, *args, **kwargs)
        if self.rots:
            path = Path(self._strip_protocol(rpath))
            path.write_bytes(b"?" + path.read_bytes()[1:])

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """Say the checksum too."""
        info: dict[str, Any] = super().info(path, **kwargs)
        if info["type"] == "file":
            digest = hashlib.md5(Path(info["name"]).read_bytes()).digest()
            info["md5Hash"] = base64.b64encode(digest).decode()
        return info


fsspec.register_implementation("summing", Summing, clobber=True)


def test_a_checksum_decides_where_the_store_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same content is not sent twice, other content of the same size is, and a rotten byte is seen."""
    monkeypatch.setattr(Summing, "puts", [])
    folder, local = RemoteFolder(f"summing://{tmp_path}/store"), tmp_path / "a"
    local.write_text("one")
    folder.put(local, "a")
    folder.put(local, "a")
    assert len(Summing.puts) == 2  # the first one found no parent folder
    local.write_text("two")
    folder.put(local, "a")
    assert folder.read("a") == b"two"
    monkeypatch.setattr(Summing, "rots", True)
    local.write_text("six")
    with pytest.raises(OSError, match="another checksum"):
        folder.put(local, "a")


def test_a_staged_folder_in_which_others_still_remove_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told of a file that waits there when none does."""
    scandir = os.scandir

    def vanishing(path: Any = ".") -> Any:
        if str(path).endswith("vanishes"):
            monkeypatch.setattr(os, "scandir", scandir)
            Path(path).rmdir()
        return scandir(path)

    (tmp_path / "staged" / "step_000001" / "vanishes").mkdir(parents=True)
    monkeypatch.setattr(os, "scandir", vanishing)
    assert remove_empty(tmp_path / "staged")
    assert not (tmp_path / "staged").exists()
