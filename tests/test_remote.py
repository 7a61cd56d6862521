"""Folders behind a URL, on real file systems of fsspec."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from test_top import write_run

from verl_profiling.commands.trigger import find_job
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.remote import RemoteFolder, is_url


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
    assert is_url(path) is expected


def test_a_thread_takes_its_file_system_with_it(tmp_path: Path) -> None:
    """A run of a month has thousands of threads, and each would leave its connections behind."""
    left: list[weakref.ref[Any]] = []
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: left.append(weakref.ref(RemoteFolder(f"file://{tmp_path}")._fs))
        )
        thread.start()
        thread.join()
    gc.collect()
    assert [reference() for reference in left] == [None] * 3


def test_a_request_that_its_job_takes_at_once_was_written(tmp_path: Path) -> None:
    """Its reader removes it before the writer has read it back."""
    folder, over = RemoteFolder(f"file://{tmp_path}"), threading.Event()

    def take() -> None:
        while not over.is_set():
            for path in tmp_path.iterdir():
                path.unlink()

    reader = threading.Thread(target=take)
    reader.start()
    try:
        assert all(folder.create(f"{number}.json", b"{}") for number in range(300))
    finally:
        over.set()
        reader.join()


def test_of_several_runs_behind_a_url_each_can_be_chosen(tmp_path: Path) -> None:
    """By the addresses that the error lists."""
    runs = [tmp_path / "run", tmp_path / "run" / "run_2"]
    for run in runs:
        write_run(run)
    with pytest.raises(TraceFormatError) as error:
        find_job(f"file://{runs[0]}")
    listed = error.value.problem.removeprefix("there are several runs, choose one: ").split(", ")
    assert [find_job(address).folder.url for address in listed] == [f"file://{run}" for run in runs]
