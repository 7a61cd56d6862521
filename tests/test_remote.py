"""Folders behind a URL, on real file systems of fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_profiling.remote import RemoteFolder, is_url


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
