"""Calls to workers: sent to all at once, waited for until one deadline, and what came back.

Calling never raises: a worker that is dead, hung or of a wrong type becomes a :class:`Call` without a reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from verl_profiling import clock
from verl_profiling.identity import ROLLOUT_ROLE

T = TypeVar("T")
Waits = Generator[Callable[[], object], None, T]
"""What a hook does: it yields functions that wait, which the asynchronous callback runs on a thread."""


class Call:
    """One call to one worker.

    Attributes:
        worker: The called worker: a target and an index in it.
        sent_ns: When it was sent, on the controller's clock.
        returned_ns: When its outcome arrived; 0 while it has not.
        awaited: ``False`` when the worker is known to be busy with an earlier call.
    """

    def __init__(self, target: Target, index: int, method: str, future: Future[Any], sent_ns: int) -> None:
        self.target, self.index, self.method = target, index, method
        self.worker: Worker = target, index
        self.future = future
        self.sent_ns = sent_ns
        self.returned_ns = 0
        self.awaited = True
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

    def problem(self, waited_s: float) -> str:
        """Return the reason why there is no answer, in one line."""
        if not self.future.done():
            if not self.awaited:
                return f"{self.method} was not waited for: the worker has not answered an earlier call yet"
            return f"{self.method} did not return within {waited_s:g} s; is the worker hung or busy?"
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
    """The outcome of a coroutine that runs while its round is waited for, on the thread that waits.

    Args:
        coroutine: The coroutine.
        loop: The event loop that it needs; ``None`` for a new one.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__()
        self.loop = loop
        self._coroutine = coroutine
        self._began = False

    async def run(self) -> None:
        """Run the coroutine on this event loop, and set the outcome."""
        self._began = True
        try:
            answer = await self._coroutine
        except (Exception, asyncio.CancelledError) as error:
            self.fail(error)
        else:
            if not self.done():
                self.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """Set an error as the outcome, unless there is one."""
        if not self._began:
            self._coroutine.close()
        if not self.done():
            self.set_exception(error)


class Round:
    """The same call to several workers at once.

    Args:
        calls: What was sent.
        timeout_s: How long to wait for the slowest, in seconds.
    """

    def __init__(self, calls: Sequence[Call], timeout_s: float) -> None:
        self.calls = calls
        self.timeout_s = timeout_s

    def wait(self) -> None:
        """Block until all calls have returned or the time is up. Coroutines run side by side meanwhile."""
        deadline = time.monotonic() + self.timeout_s
        by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Postponed, bool]]] = {}
        for call in self.calls:
            if isinstance(call.future, Postponed):
                by_loop.setdefault(call.future.loop, []).append((call.future, call.awaited))
        for loop, together in by_loop.items():
            late = f"it did not return within {self.timeout_s:g} s, and was cancelled"
            running = self._run(together, deadline, late if loop is None else "")
            try:
                if loop is None:
                    asyncio.run(running)
                else:
                    loop.run_until_complete(running)
            except Exception as error:
                running.close()
                for future, _ in together:
                    future.fail(error)
        awaited = {call.future for call in self.calls if call.awaited}
        concurrent.futures.wait(awaited, max(0.0, deadline - time.monotonic()))

    @staticmethod
    async def _run(together: list[tuple[Postponed, bool]], deadline: float, late: str) -> None:
        """Run coroutines; what is late on the caller's loop goes on when that runs again."""
        tasks = [(asyncio.ensure_future(future.run()), awaited) for future, awaited in together]
        if awaited_tasks := [task for task, awaited in tasks if awaited]:
            await asyncio.wait(awaited_tasks, timeout=max(0.0, deadline - time.monotonic()))
        for future, _ in together if late else ():
            future.fail(TimeoutError(late))


class Target(ABC):
    """One worker, or a group that can only be called as a whole.

    Attributes:
        roles: The roles under which it was added; several for a process with several roles.
        size: Number of workers that answer a call.
        first: Index of the first of them among the workers of its role.
        key: Equal for targets that are the same workers.
        is_local: It is an object of this process.
    """

    is_local = False

    def __init__(self, role: str, first: int, size: int, key: Hashable) -> None:
        self.roles = [role]
        self.first, self.size, self.key = first, size, key

    @property
    def workers(self) -> list[Worker]:
        """Its workers, each by its index in it."""
        return [(self, index) for index in range(self.size)]

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
            futures = [Future() for _ in range(self.size)]
            for future in futures:
                future.set_exception(error)
        return [Call(self, index, method, future, sent_ns) for index, future in enumerate(futures)]


Worker = tuple[Target, int]


def outcome_of(function: Callable[[], Any]) -> Future[Any]:
    """Call a function; return its outcome."""
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except (Exception, asyncio.CancelledError) as error:
        future.set_exception(error)
    return future
