"""Calls to workers: sent to all at once, waited for until one deadline, and what came back.

Calling never raises: a worker that is dead, hung or of a wrong type becomes a :class:`Call` without a reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from verl_profiling import clock
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity

T = TypeVar("T")
Waits = Generator[Callable[[], object], None, T]
"""What a hook does: it yields functions that wait, which the asynchronous callback runs on a thread."""


class Worker:
    """One worker of a target.

    Attributes:
        target: Its target.
        number: Its index in the role.
        identity: Who it is: what it said last, or what its target says of it.
        owed: The outcomes of calls that it has not answered yet.
    """

    def __init__(self, target: Target, number: int) -> None:
        self.target, self.number = target, number
        self.identity = WorkerIdentity(
            role=target.roles[0],
            rank=number,
            replica=number if target.is_rollout else None,
            host="unknown",
            clock_domain="unknown",
            pid=0,
        )
        self.owed: set[Future[Any]] = set()


class Call:
    """One call to one worker.

    Attributes:
        worker: The called worker.
        sent_ns: When it was sent, on the controller's clock.
        returned_ns: When its outcome arrived; 0 while it has not.
        timeout_s: How long it is waited for; 0 when the worker is known to be busy with an earlier call.
    """

    def __init__(self, worker: Worker, method: str, future: Future[Any], sent_ns: int) -> None:
        self.worker, self.target = worker, worker.target
        self.method = method
        self.future = future
        self.sent_ns = sent_ns
        self.returned_ns = 0
        self.timeout_s = 0.0
        future.add_done_callback(self._note_return)

    def _note_return(self, future: Future[Any]) -> None:
        self.returned_ns = clock.now_ns()

    @property
    def error(self) -> BaseException | None:
        """The exception that the worker raised; ``None`` while there is none."""
        try:
            return self.future.exception() if self.future.done() else None
        except concurrent.futures.CancelledError as error:
            return error

    def reply(self) -> Any:
        """Return the worker's answer, or ``None`` if there is none."""
        return self.future.result() if self.future.done() and self.error is None else None

    def problem(self) -> str:
        """Return the reason why there is no answer, in one line."""
        if not self.future.done():
            if not self.timeout_s:
                return f"{self.method} was not waited for: the worker has not answered an earlier call yet"
            return f"{self.method} did not return within {self.timeout_s:g} s; is the worker hung or busy?"
        error = self.error
        if error is None:
            answer = type(self.future.result()).__name__
            return (
                f"{self.method} returned {answer}, not an answer to the callback; "
                "let the worker's class inherit a mixin of verl_profiling.workers"
            )
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines() or [""]
        return f"{self.method} raised {type(cause).__name__}: {lines[0]}"


class Postponed(Future[Any]):
    """The outcome of a coroutine that runs while it is waited for, on the thread that waits.

    Args:
        coroutine: The coroutine.
        loop: The event loop that it needs; ``None`` for a new one.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__()
        self.coroutine, self.loop = coroutine, loop

    def fail(self, error: BaseException) -> None:
        """Set an error as the outcome, unless there is one: the coroutine does not run."""
        if not self.done():
            self.coroutine.close()
            self.set_exception(error)


def wait_for(calls: Iterable[Call]) -> None:
    """Block until all calls have returned or the time is up. Coroutines run side by side meanwhile."""
    awaited = [call for call in calls if call.timeout_s]
    timeout_s = max((call.timeout_s for call in awaited), default=0.0)
    deadline_s = time.monotonic() + timeout_s
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Postponed]] = {}
    for call in awaited:
        if isinstance(call.future, Postponed):
            by_loop.setdefault(call.future.loop, []).append(call.future)
    for loop, together in by_loop.items():
        running = _run(together, deadline_s, f"it did not return within {timeout_s:g} s, and was cancelled")
        try:
            asyncio.run(running) if loop is None else loop.run_until_complete(running)
        except BaseException as error:
            running.close()
            for future in together:
                future.fail(error)
            if not isinstance(error, Exception):
                raise
    concurrent.futures.wait([call.future for call in awaited], max(0.0, deadline_s - time.monotonic()))


async def _run(together: list[Postponed], deadline_s: float, late: str) -> None:
    """Run coroutines until the deadline, and set their outcomes."""
    tasks = [asyncio.ensure_future(future.coroutine) for future in together]
    await asyncio.wait(tasks, timeout=max(0.0, deadline_s - time.monotonic()))
    for task, future in zip(tasks, together, strict=True):
        if task.done():
            settle(future, task.result)
        else:
            task.cancel()
            future.set_exception(TimeoutError(late))


class Target(ABC):
    """One worker, or a group that can only be called as a whole.

    Attributes:
        roles: The roles under which it was added; several for a process with several roles.
        workers: Those that answer a call, in order.
        key: Equal for targets that are the same workers.
        is_local: It is an object of this process.
    """

    is_local = False

    def __init__(self, role: str, first: int, size: int, key: Hashable) -> None:
        self.roles = [role]
        self.workers = [Worker(self, first + index) for index in range(size)]
        self.key = key

    @property
    def is_rollout(self) -> bool:
        """Whether each of them is a replica of an engine."""
        return self.roles[0] == ROLLOUT_ROLE

    @abstractmethod
    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        """Start a call and return one future per worker."""

    def call(self, method: str, *arguments: Any) -> list[Call]:
        """Call a method of every worker of this target, without waiting."""
        sent_ns = clock.now_ns()
        try:
            futures = self.start(method, arguments)
        except Exception as error:
            futures = [Future() for _ in self.workers]
            for future in futures:
                future.set_exception(error)
        return [
            Call(worker, method, future, sent_ns)
            for worker, future in zip(self.workers, futures, strict=False)
        ]


def settle(future: Future[Any], function: Callable[[], Any]) -> Future[Any]:
    """Call a function, and set its outcome."""
    try:
        future.set_result(function())
    except (Exception, asyncio.CancelledError) as error:
        future.set_exception(error)
    return future
