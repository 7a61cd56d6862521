"""The workers that the callback can call, the calls, how long they are waited for, and what came back.

A call goes to all targets at once and has one deadline. Calling never raises: a worker that is dead,
hung or of a wrong type becomes a :class:`Call` without a reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from verl_profiling import clock
from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE

__all__ = ["Call", "Postponed", "Round", "Target", "Waits", "Worker", "make_targets"]

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
            futures = [_failed(error) for _ in range(self.size)]
        return [Call(self, index, method, future, sent_ns) for index, future in enumerate(futures)]


Worker = tuple[Target, int]


MANY_IN_TURN = 16


class _RayActor(Target):
    def __init__(self, role: str, first: int, handle: Any) -> None:
        super().__init__(role, first, 1)
        self._handle = handle

    @property
    def key(self) -> Hashable:
        return _identity_of(self._handle)

    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        _check_in_cluster()
        return [getattr(self._handle, method).remote(*arguments).future()]


class _WorkerGroup(Target):
    """A group with verl's convention: ``execute_all_async(method, *args)`` returns a reference per worker.

    A method that the group itself has is called directly: colocated workers have it under another name.
    """

    def __init__(self, role: str, group: Any) -> None:
        super().__init__(role, 0, _group_size(group))
        self._group = group

    @property
    def key(self) -> Hashable:
        workers = getattr(self._group, "workers", None) or [self._group]
        return frozenset(_identity_of(worker) for worker in workers)

    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        if _is_actor(next(iter(getattr(self._group, "workers", None) or ()), None)):
            _check_in_cluster()
        bound = getattr(self._group, method, None)
        if bound is not None:
            references = bound(*arguments)
        else:
            references = self._group.execute_all_async(method, *arguments)
        return [_future_of(reference) for reference in references]


class _Local(Target):
    """An object of this process. Its coroutines run side by side with those of others.

    Its plain methods run on the calling thread, one object after another.

    Args:
        role: Its role.
        first: Its index in the role.
        worker: The object.
        loop: Event loop of its coroutines; by default the caller's, or a new one.

    Attributes:
        on_threads: Its plain methods run on threads: more than ``MANY_IN_TURN`` objects of a role
            stand for other processes, which answer side by side.
    """

    is_local = True
    on_threads = False

    def __init__(self, role: str, first: int, worker: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__(role, first, 1)
        self._worker = worker
        self._loop = loop

    @property
    def key(self) -> Hashable:
        return id(self._worker)

    def is_coroutine(self, method: str) -> bool:
        """Return whether a method of the object is a coroutine."""
        return inspect.iscoroutinefunction(getattr(self._worker, method))

    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        function = getattr(self._worker, method)
        if self.is_coroutine(method):
            loop = self._loop or asyncio._get_running_loop()
            if loop is not None and loop.is_running():
                return [asyncio.run_coroutine_threadsafe(function(*arguments), loop)]
            return [Postponed(function(*arguments), loop)]
        if self.on_threads:
            return [_on_thread(lambda: function(*arguments))]
        return [_done(lambda: function(*arguments))]


def make_targets(
    role: str, workers: Any, loop: asyncio.AbstractEventLoop | None = None, method: str = "start_capture"
) -> list[Target]:
    """Return the targets for the workers that a user added.

    Args:
        role: The role they are added under.
        workers: A worker group, a Ray actor handle, an object, or an iterable of the latter two.
        loop: Event loop on which local objects' coroutines run.
        method: A method that each must have.

    Raises:
        ConfigError: There are no workers, or one has no capture methods.
    """
    if callable(getattr(workers, "execute_all_async", None)):
        return [_WorkerGroup(role, workers)]
    if _is_actor(workers) or hasattr(workers, method) or not isinstance(workers, Iterable):
        workers = [workers]
    targets: list[Target] = []
    for index, worker in enumerate(workers):
        if not hasattr(worker, method):
            raise ConfigError(
                "",
                f"worker {index} of role {role!r} ({type(worker).__name__}) has no {method}; "
                "let its class inherit a mixin of verl_profiling.workers",
            )
        if _is_actor(worker):
            targets.append(_RayActor(role, index, worker))
        else:
            targets.append(_Local(role, index, worker, loop))
    if not targets:
        raise ConfigError("", f"role {role!r} has no workers")
    in_turn = [target for target in targets if isinstance(target, _Local) and not target.is_coroutine(method)]
    for target in in_turn:
        target.on_threads = len(in_turn) > MANY_IN_TURN
    return targets


def _check_in_cluster() -> None:
    """Check that an actor may be called: without a cluster, Ray would start another one for the call."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise RuntimeError("this process has left its Ray cluster")


def _is_actor(worker: object) -> bool:
    return type(worker).__module__.startswith("ray.") and type(worker).__name__ == "ActorHandle"


def _identity_of(worker: Any) -> str | int:
    return str(worker._actor_id.hex()) if _is_actor(worker) else id(worker)


def _group_size(group: Any) -> int:
    size = getattr(group, "world_size", None)
    return size if isinstance(size, int) else len(getattr(group, "workers", ()) or (group,))


def _future_of(reference: Any) -> Future[Any]:
    if hasattr(reference, "future"):
        future: Future[Any] = reference.future()
        return future
    return _done(lambda: reference)


def _done(function: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(function())
    except (Exception, asyncio.CancelledError) as error:
        future.set_exception(error)
    return future


def _on_thread(function: Callable[[], Any]) -> Future[Any]:
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="verl-profiling-call")
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
