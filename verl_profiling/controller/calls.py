"""Calls to workers: to whom, how long they are waited for, and what came back.

A call goes to all targets at once and has one deadline. Calling never raises: a worker that is dead,
hung or of a wrong type becomes a :class:`Call` without a reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from verl_profiling import clock
from verl_profiling.identity import ROLLOUT_ROLE

__all__ = ["Call", "Postponed", "Round", "Target", "Waits", "Worker", "failed"]

T = TypeVar("T")
Waits = Generator[Callable[[], object], None, T]
"""What a hook does: it yields functions that wait, which the asynchronous callback runs on a thread."""


class Call:
    """One call to one worker.

    Attributes:
        sent_ns: When it was sent, on the controller's clock.
        returned_ns: When its outcome arrived; 0 while it has not.
        awaited: ``False`` when the worker is known to be busy with an earlier call.
    """

    def __init__(self, target: Target, index: int, method: str, future: Future[Any], sent_ns: int) -> None:
        self.target = target
        self.index = index
        self.method = method
        self.future = future
        self.sent_ns = sent_ns
        self.returned_ns = 0
        self.awaited = True
        future.add_done_callback(self._note_return)

    def _note_return(self, future: Future[Any]) -> None:
        self.returned_ns = clock.now_ns()

    @property
    def worker(self) -> Worker:
        """The called worker: a target and an index in it."""
        return self.target, self.index

    def reply(self) -> Any:
        """Return the worker's answer, or ``None`` if there is none."""
        return self.future.result() if self.future.done() and self._error() is None else None

    @property
    def raised(self) -> bool:
        """Whether it has returned without an answer."""
        return self.future.done() and self._error() is not None

    @property
    def without_method(self) -> bool:
        """Whether the worker has no such method."""
        return self._raised("AttributeError")

    @property
    def died(self) -> bool:
        """Whether Ray says that the worker's process has died."""
        return self._raised("ActorDiedError")

    @property
    def may_have_died(self) -> bool:
        """Whether Ray says that, or "unavailable", as it first does of an actor that it restarts."""
        return self._raised("ActorDiedError", "ActorUnavailableError")

    def _raised(self, *kinds: str) -> bool:
        return self.raised and type(self._error()).__name__ in kinds

    def problem(self, waited_s: float) -> str:
        """Return the reason why there is no answer, in one line."""
        if not self.awaited and not self.future.done():
            return f"{self.method} was not waited for: the worker has not answered an earlier call yet"
        if not self.future.done():
            return f"{self.method} did not return within {waited_s:g} s; is the worker hung or busy?"
        error = self._error()
        if error is None:
            answer = type(self.future.result()).__name__
            return (
                f"{self.method} returned {answer}, not an answer to the callback; "
                "let the worker's class inherit a mixin of verl_profiling.workers"
            )
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines() or [""]
        return f"{self.method} raised {type(cause).__name__}: {lines[0]}"

    def _error(self) -> BaseException | None:
        try:
            return self.future.exception()
        except concurrent.futures.CancelledError as error:
            return error


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
        if task.cancelled():
            self.fail(asyncio.CancelledError("it was cancelled"))
        elif (error := task.exception()) is not None:
            self.fail(error)
        elif not self.done():
            self.set_result(task.result())


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
        by_loop: dict[asyncio.AbstractEventLoop | None, list[Call]] = {}
        for call in self.calls:
            if isinstance(call.future, Postponed):
                by_loop.setdefault(call.future.loop, []).append(call)
        for loop, together in by_loop.items():
            running = self._run(together, loop is None, deadline)
            try:
                if loop is None:
                    asyncio.run(running)
                else:
                    loop.run_until_complete(running)
            except Exception as error:
                running.close()
                for call in together:
                    if isinstance(call.future, Postponed):
                        call.future.fail(error)
        awaited = {call.future for call in self.calls if call.awaited}
        concurrent.futures.wait(awaited, max(0.0, deadline - time.monotonic()))

    async def _run(self, calls: Iterable[Call], on_new_loop: bool, deadline: float) -> None:
        """Run coroutines; what is late on the caller's loop goes on when that runs again."""
        begun = [(call, call.future) for call in calls if isinstance(call.future, Postponed)]
        tasks = [(call, future.task()) for call, future in begun]
        if awaited := [task for call, task in tasks if call.awaited]:
            await asyncio.wait(awaited, timeout=max(0.0, deadline - time.monotonic()))
        for _, future in begun if on_new_loop else ():
            late = f"it did not return within {self.timeout_s:g} s, and was cancelled"
            future.fail(TimeoutError(late))


class Target(ABC):
    """One worker, or a group that can only be called as a whole.

    Attributes:
        roles: The roles under which it was added; several for a process with several roles.
        size: Number of workers that answer a call.
        first: Index of the first of them among the workers of its role.
        is_local: It is an object of this process.
    """

    is_local = False

    def __init__(self, role: str, first: int, size: int) -> None:
        self.roles = [role]
        self.first = first
        self.size = size

    @property
    def is_rollout(self) -> bool:
        """Whether each of them is a replica of an engine."""
        return self.roles[0] == ROLLOUT_ROLE

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Equal for targets that are the same workers."""

    @abstractmethod
    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        """Start a call and return one future per worker."""

    def call(self, method: str, *arguments: Any) -> list[Call]:
        """Call a method of every worker of this target, without waiting."""
        sent_ns = clock.now_ns()
        try:
            futures = self.start(method, arguments)
        except Exception as error:
            futures = [failed(error) for _ in range(self.size)]
        return [Call(self, index, method, future, sent_ns) for index, future in enumerate(futures)]


Worker = tuple[Target, int]


def failed(error: Exception) -> Future[Any]:
    """Return the future of a call that could not be made."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
