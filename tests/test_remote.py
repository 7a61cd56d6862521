"""Folders behind a URL, on real file systems of fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_profiling.remote import RemoteFolder


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
