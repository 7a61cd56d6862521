"""Calls to workers: sent to all at once, with one common deadline, and their replies.

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
"""The work of a hook: a generator of blocking functions; the asynchronous callback runs them on a thread."""


class Worker:
    """One worker of a target.

    Attributes:
        target: The target that the worker belongs to.
        number: The worker's index in the role.
        identity: The identity in its last reply; before its first reply, one made from the target.
        last_call: The future of the last call; until it is done, the worker is busy.
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
        self.last_call: Future[Any] | None = None


class Call:
    """One call to one worker.

    Attributes:
        worker: The called worker.
        sent_ns: When the call was sent, on the controller's clock.
        returned_ns: When the reply or error arrived; 0 before that.
        timeout_s: How long to wait for the reply; 0 if the worker is still busy with an earlier call.
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
        """Return the worker's reply, or ``None`` without one."""
        try:
            return self.future.result(0) if self.future.done() else None
        except (Exception, asyncio.CancelledError):
            return None

    def problem(self) -> str:
        """Return in one line why there is no valid reply."""
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
    """The future of a coroutine that starts inside :func:`wait_for`, on the waiting thread.

    Args:
        coroutine: The coroutine.
        loop: The event loop that it needs; ``None`` for a new one.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__()
        self.loop = loop
        self._coroutine = coroutine
        self._has_begun = False

    async def run(self) -> None:
        """Run the coroutine on this event loop, and set the outcome."""
        self._has_begun = True
        try:
            answer = await self._coroutine
        except (Exception, asyncio.CancelledError) as error:
            self.fail(error)
        else:
            if not self.done():
                self.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """Set an error as the outcome, unless one is set; close the coroutine if it has not begun."""
        if not self._has_begun:
            self._coroutine.close()
        if not self.done():
            self.set_exception(error)


def wait_for(calls: Iterable[Call]) -> None:
    """Block until all calls have returned or the longest timeout is over. Coroutines run concurrently."""
    timeout_s, awaited = 0.0, []
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Postponed, bool]]] = {}
    for call in calls:
        timeout_s = max(timeout_s, call.timeout_s)
        if call.timeout_s:
            awaited.append(call.future)
        if isinstance(call.future, Postponed):
            by_loop.setdefault(call.future.loop, []).append((call.future, bool(call.timeout_s)))
    deadline_s = time.monotonic() + timeout_s
    for loop, together in by_loop.items():
        late = f"it did not return within {timeout_s:g} s, and was cancelled"
        running = _run(together, deadline_s, late if loop is None else "")
        try:
            asyncio.run(running) if loop is None else loop.run_until_complete(running)
        except Exception as error:
            running.close()
            for future, _ in together:
                future.fail(error)
    concurrent.futures.wait(awaited, max(0.0, deadline_s - time.monotonic()))


async def _run(together: list[tuple[Postponed, bool]], deadline_s: float, late: str) -> None:
    """Run coroutines until the deadline; late ones on the caller's loop continue when the loop runs again."""
    tasks = [(asyncio.ensure_future(future.run()), is_awaited) for future, is_awaited in together]
    if awaited := [task for task, is_awaited in tasks if is_awaited]:
        await asyncio.wait(awaited, timeout=max(0.0, deadline_s - time.monotonic()))
    for future, _ in together if late else ():
        future.fail(TimeoutError(late))


class Target(ABC):
    """One worker, or a group that can only be called as a whole.

    Attributes:
        roles: The roles under which it was added; several for a process with several roles.
        workers: The workers that a call reaches, in the order of its futures.
        key: Equal for two targets with the same workers.
        is_local: Whether the worker is an object of this process.
    """

    is_local = False

    def __init__(self, role: str, first: int, size: int, key: Hashable) -> None:
        self.roles = [role]
        self.workers = [Worker(self, first + index) for index in range(size)]
        self.key = key

    @property
    def is_rollout(self) -> bool:
        """Whether the workers are replicas of a rollout engine."""
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
    """Call a function, and set its return value or exception on the future."""
    try:
        future.set_result(function())
    except (Exception, asyncio.CancelledError) as error:
        future.set_exception(error)
    return future
