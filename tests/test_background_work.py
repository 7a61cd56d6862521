"""A thread that does work in order."""

from __future__ import annotations

import threading

from verl_profiling.afterwards.background import BackgroundWork


def threads() -> list[str]:
    """Return the threads that do such work."""
    return [thread.name for thread in threading.enumerate() if thread.name == "verl-profiling-of-a-test"]


def test_what_is_closed_leaves_no_thread_and_works_again() -> None:
    """All that was submitted is done; the thread does not wait for more, and later work starts another."""
    work = BackgroundWork("of-a-test", idle_s=60.0)
    done: list[int] = []
    for turn in range(3):
        for number in range(5):
            work.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        assert work.close(10.0)
        assert done == list(range(5)) * (turn + 1)
        for thread in threading.enumerate():
            if thread.name == "verl-profiling-of-a-test":
                thread.join(10.0)
        assert threads() == []
