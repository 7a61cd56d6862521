"""Folders behind a URL, on real file systems of fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    folder.put(tmp_path / "npu", "actor_rank0.npu", 1.0)
    folder.put(tmp_path / "one", "one", 1.0)
    assert folder.names() == {"actor_rank0.npu", "one"}
    assert folder.read("actor_rank0.npu/deep/a.json") == b"[1]"
    assert len(folder.read("one")) == 100_000


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
