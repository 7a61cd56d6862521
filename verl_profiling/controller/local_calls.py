"""Coroutines of local objects, where no event loop runs: those of a round run side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Container, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

__all__ = ["Postponed", "run_side_by_side"]


class Postponed(Future[Any]):
    """The outcome of a coroutine that runs while its round is waited for, on the thread that waits.

    Args:
        coroutine: The coroutine.
        loop: The event loop that it needs; ``None`` for a new one.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__()
        self.loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[Any] | None = None

    def task(self) -> asyncio.Task[Any]:
        """Return the task that runs the coroutine on this event loop, and sets the outcome."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._coroutine)
            self._task.add_done_callback(self._take)
        return self._task

    def fail(self, error: BaseException) -> None:
        """Set an error as the outcome, unless there is one."""
        if self._task is None:
            self._coroutine.close()
        if not self.done():
            self.set_exception(error)

    def _take(self, task: asyncio.Task[Any]) -> None:
        if self.done():
            return
        error = asyncio.CancelledError("it was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


def run_side_by_side(
    outcomes: Iterable[Postponed], awaited: Container[Future[Any]], timeout_s: float
) -> None:
    """Begin coroutines, and run them until those that are awaited have returned or the time is up.

    What is late on a loop of the caller's goes on when that loop runs again; on a new loop it is cancelled.
    """
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Postponed]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.loop, []).append(outcome)
    deadline = time.monotonic() + timeout_s
    for loop, together in by_loop.items():
        running = _run(together, awaited, max(0.0, deadline - time.monotonic()))
        try:
            if loop is None:
                asyncio.run(_cancelling(running, together, timeout_s))
            else:
                loop.run_until_complete(running)
        except Exception as error:
            running.close()
            for outcome in together:
                outcome.fail(error)


async def _run(outcomes: Sequence[Postponed], awaited: Container[Future[Any]], wait_s: float) -> None:
    tasks = [(outcome.task(), outcome in awaited) for outcome in outcomes]
    if waited_for := [task for task, waits in tasks if waits]:
        await asyncio.wait(waited_for, timeout=wait_s)


async def _cancelling(
    running: Coroutine[Any, Any, None], outcomes: Sequence[Postponed], timeout_s: float
) -> None:
    await running
    for outcome in outcomes:
        outcome.fail(TimeoutError(f"it did not return within {timeout_s:g} s, and was cancelled"))
