"""Calls to workers: to whom, how long they are waited for, and what came back.

A call goes to all targets at once and has one deadline. Calling never raises: a worker that is dead,
hung or of a wrong type becomes a :class:`Call` without a reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from verl_profiling import clock
from verl_profiling.controller.local_calls import Postponed, run_side_by_side
from verl_profiling.identity import ROLLOUT_ROLE

__all__ = ["Call", "Round", "Target", "Waiting", "Worker", "failed"]


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
    def died(self) -> bool:
        """Whether Ray says that the worker's process has died."""
        return self._raised("ActorDiedError")

    @property
    def may_have_died(self) -> bool:
        """Whether Ray says that, or "unavailable", as it first does of an actor that it restarts."""
        return self.died or self._raised("ActorUnavailableError")

    @property
    def raised(self) -> bool:
        """Whether it has returned without an answer."""
        return self.future.done() and self._error() is not None

    @property
    def without_method(self) -> bool:
        """Whether the worker has no such method."""
        return self._raised("AttributeError")

    def _raised(self, kind: str) -> bool:
        return self.future.done() and type(self._error()).__name__ == kind

    def _error(self) -> BaseException | None:
        try:
            return self.future.exception()
        except concurrent.futures.CancelledError as error:
            return error

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
        """Block until all calls have returned or the time is up."""
        deadline = time.monotonic() + self.timeout_s
        awaited = {call.future for call in self.calls if call.awaited}
        postponed = [call.future for call in self.calls if isinstance(call.future, Postponed)]
        run_side_by_side(postponed, awaited, self.timeout_s)
        concurrent.futures.wait(awaited, max(0.0, deadline - time.monotonic()))

    async def wait_async(self) -> None:
        """Like :meth:`wait`, leaving the event loop free."""
        if not all(call.future.done() for call in self.calls if call.awaited):
            await asyncio.to_thread(self.wait)


class Waiting(Round):
    """Waits in a function, which returns by itself.

    Args:
        wait: Called with the timeout.
        timeout_s: How long to wait, in seconds; 0 for not at all.
    """

    def __init__(self, wait: Callable[[float], object], timeout_s: float) -> None:
        super().__init__((), timeout_s)
        self._wait = wait

    def wait(self) -> None:
        """See :class:`Round`."""
        if self.timeout_s:
            self._wait(self.timeout_s)

    async def wait_async(self) -> None:
        """See :class:`Round`."""
        if self.timeout_s:
            await asyncio.to_thread(self.wait)


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
