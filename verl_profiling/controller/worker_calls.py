"""Calls to the workers of a callback, and their replies.

All workers are called concurrently, with a common deadline. No call raises: a dead or hung worker,
or one of a wrong type, gives a :class:`Call` without a reply.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import sys
import time
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from verl_profiling import clock
from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity

T = TypeVar("T")
Waits = Generator[Callable[[], object], None, T]
"""Generator of blocking functions, which the callback runs in turn; it returns a ``T``.

The asynchronous callback runs them on a thread, and so does not block its event loop.
"""

Send = Callable[..., list[Future[Any]]]

logger = logging.getLogger(__name__)


class WorkerLostError(ConnectionError):
    """A worker's process cannot be called any more, or not yet.

    The message is the end of a sentence about the process, e.g. ``has ended (pid 12)``.

    Attributes:
        pid: The process that has ended; 0 if there was none yet.
        at_ns: When its end was seen (unix ns).
    """

    pid: int = 0
    at_ns: int = 0


class Worker:
    """One worker that the callback calls, alone or in a group.

    Attributes:
        target: The target that the worker belongs to.
        number: The worker's index in the role.
        identity: Identity of the worker in its last reply; before the first reply, an identity made
            from the target.
        last_call: Future of the last call; the worker is busy until the future is done.
    """

    def __init__(self, target: Target, number: int) -> None:
        self.target = target
        self.number = number
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
        sent_ns: Time of sending, on the controller's clock.
        returned_ns: Arrival of the reply or error, on the controller's clock; 0 before.
        timeout_s: Timeout of the reply (s); 0 if the worker is still busy with an earlier call.
    """

    def __init__(self, worker: Worker, method: str, future: Future[Any], sent_ns: int) -> None:
        self.worker = worker
        self.target = worker.target
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
        with suppress(Exception, asyncio.CancelledError):  # it is in :attr:`error`
            return self.future.result(timeout=0)
        return None

    def problem(self) -> str:
        """Return in one line why there is no valid reply."""
        if not self.future.done():
            problem = f"did not return within {self.timeout_s:g} s; is the worker hung or busy?"
            if not self.timeout_s:
                problem = "was not waited for: the worker still owes the reply to an earlier call"
            return f"{self.method} {problem}"
        error = self.error
        if error is None:
            answer = type(self.future.result()).__name__
            return (
                f"{self.method} returned {answer}, which is no reply to the callback; "
                "let the worker's class inherit a mixin of verl_profiling.workers"
            )
        if isinstance(error, WorkerLostError):
            return f"its process {error}"
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines() or [""]
        return f"{self.method} raised {type(cause).__name__}: {lines[0]}"


class Postponed(Future[Any]):
    """The future of a coroutine whose event loop does not run now: :func:`wait_for` runs it.

    Args:
        function: The coroutine function.
        loop: The event loop of the coroutine; ``None`` for a new event loop.
    """

    def __init__(self, function: Callable[[], Any], loop: asyncio.AbstractEventLoop | None) -> None:
        super().__init__()
        self.loop = loop
        self._function = function

    async def run(self) -> None:
        """Call the function on this event loop, and set the outcome."""
        try:
            self.set_result(await self._function())
        except (Exception, asyncio.CancelledError) as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Set an error as the outcome, unless there is an outcome already."""
        if not self.done():
            self.set_exception(error)


def wait_for(calls: Iterable[Call]) -> None:
    """Block until all calls have returned or the longest timeout is over.
    Coroutines run concurrently.
    """
    awaited: list[Future[Any]] = []
    by_loop: dict[asyncio.AbstractEventLoop | None, dict[Postponed, bool]] = {}
    timeout_s = 0.0
    for call in calls:
        timeout_s = max(timeout_s, call.timeout_s)
        if call.timeout_s:
            awaited.append(call.future)
        if isinstance(call.future, Postponed):
            by_loop.setdefault(call.future.loop, {})[call.future] = bool(call.timeout_s)
    deadline_s = time.monotonic() + timeout_s
    late = f"the coroutine did not return within {timeout_s:g} s, and was cancelled"
    for loop, postponed in by_loop.items():
        running = _run(postponed, deadline_s, late if loop is None else "")
        try:
            asyncio.run(running) if loop is None else loop.run_until_complete(running)
        except Exception as error:
            running.close()
            for future in postponed:
                future.fail(error)
    concurrent.futures.wait(awaited, max(0.0, deadline_s - time.monotonic()))


async def _run(postponed: dict[Postponed, bool], deadline_s: float, late: str) -> None:
    """Run coroutines until the deadline.

    Args:
        postponed: The futures of the coroutines, and whether each is waited for.
        deadline_s: The deadline.
        late: Error of unfinished coroutines; empty if they continue when the caller's event loop
            runs again.
    """
    tasks = {future: asyncio.ensure_future(future.run()) for future in postponed}
    if awaited := [tasks[future] for future in postponed if postponed[future]]:
        await asyncio.wait(awaited, timeout=max(0.0, deadline_s - time.monotonic()))
    if late:
        for future in postponed:
            future.fail(TimeoutError(late))


class Target:
    """One worker, or a group that can only be called as a whole.

    Args:
        role: First role of the worker or group.
        first: Index of the first worker in the role.
        size: Number of workers.
        key: Equal for two targets with the same workers.
        send: Starts a call of a method, and returns one future per worker.
        is_local: Whether the worker is an object of this process.

    Attributes:
        roles: The roles of the target; several for a process with several roles.
        workers: The called workers, in the order of the futures.
    """

    def __init__(
        self, role: str, first: int, size: int, key: Hashable, send: Send, is_local: bool = False
    ) -> None:
        self.roles = [role]
        self.workers = [Worker(self, first + index) for index in range(size)]
        self.key = key
        self.is_local = is_local
        self._send = send

    @property
    def is_rollout(self) -> bool:
        """Whether the workers are replicas of a rollout engine."""
        return self.roles[0] == ROLLOUT_ROLE

    def call(self, method: str, *arguments: Any) -> list[Call]:
        """Call a method of every worker of this target, without waiting."""
        sent_ns = clock.now_ns()
        try:
            futures = self._send(method, *arguments)
        except Exception as error:
            futures = [Future() for _ in self.workers]
            for future in futures:
                future.set_exception(error)
        calls = []
        for worker, future in zip(self.workers, futures, strict=False):
            calls.append(Call(worker, method, future, sent_ns))
        return calls


def settle(future: Future[Any], function: Callable[[], Any]) -> Future[Any]:
    """Call a function, and set its return value or exception on the future."""
    try:
        future.set_result(function())
    except (Exception, asyncio.CancelledError) as error:
        future.set_exception(error)
    return future


def _to_actor(handle: Any, method: str, *arguments: Any) -> list[Future[Any]]:
    _check_in_cluster()
    return [getattr(handle, method).remote(*arguments).future()]


def _to_group(group: Any, has_actors: bool, method: str, *arguments: Any) -> list[Future[Any]]:
    """Call a group by verl's ``execute_all_async(method, *args)``, which returns a reference per
    worker.

    A method of the group itself is called directly, because colocated workers use other names for
    methods.
    """
    if has_actors:
        _check_in_cluster()
    bound = getattr(group, method, None)
    answers = bound(*arguments) if bound else group.execute_all_async(method, *arguments)
    return [_future_of(answer) for answer in answers]


def _to_object(
    worker: Any, of_worker: asyncio.AbstractEventLoop | None, method: str, *arguments: Any
) -> list[Future[Any]]:
    """Call an object of this process. Coroutines of several objects run concurrently.

    Plain methods run on the calling thread, one object after another.

    Args:
        worker: The object.
        of_worker: Event loop of the object's coroutines; by default the caller's, or a new one.
        method: The method.
        *arguments: Its arguments.
    """
    call = partial(getattr(worker, method), *arguments)
    if inspect.iscoroutinefunction(call.func):
        loop = of_worker or asyncio._get_running_loop()
        if loop is not None and loop.is_running():
            return [asyncio.run_coroutine_threadsafe(call(), loop)]
        return [Postponed(call, loop)]
    return [settle(Future(), call)]


def make_targets(role: str, workers: Any, loop: asyncio.AbstractEventLoop | None) -> list[Target]:
    """Return the targets for the workers that a user added.

    Args:
        role: Role of the workers.
        workers: A worker group, a Ray actor handle, an object, or an iterable of the latter two.
        loop: Event loop on which local objects' coroutines run.

    Raises:
        ConfigError: There are no workers, or a worker is a class, or has no capture methods.
    """
    if callable(getattr(workers, "execute_all_async", None)):
        members = list(getattr(workers, "workers", None) or [workers])
        world_size = getattr(workers, "world_size", None)
        size = world_size if isinstance(world_size, int) else len(members)
        key = frozenset(map(_identity_of, members))
        return [Target(role, 0, size, key, partial(_to_group, workers, _is_actor(members[0])))]
    if _is_actor(workers) or hasattr(workers, "start_capture") or not isinstance(workers, Iterable):
        workers = [workers]
    targets: list[Target] = []
    for index, worker in enumerate(workers):
        is_class = isinstance(worker, type) or type(worker).__name__.startswith("ActorClass(")
        if is_class or not hasattr(worker, "start_capture"):
            raise ConfigError(
                "",
                f"worker {index} of role {role!r} ({type(worker).__name__}) is no object or actor "
                "handle with start_capture; let its class inherit a mixin of "
                "verl_profiling.workers",
            )
        is_local = not _is_actor(worker)
        send = partial(_to_object, worker, loop) if is_local else partial(_to_actor, worker)
        targets.append(Target(role, index, 1, _identity_of(worker), send, is_local))
    if not targets:
        raise ConfigError("", f"role {role!r} has no workers")
    return targets


def _check_in_cluster() -> None:
    """Refuse to call an actor after this process left its Ray cluster,
    as Ray would start another cluster.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        raise RuntimeError("this process has left its Ray cluster")


def _is_actor(worker: object) -> bool:
    return type(worker).__module__.startswith("ray.") and type(worker).__name__ == "ActorHandle"


def _identity_of(worker: Any) -> str | int:
    return str(worker._actor_id.hex()) if _is_actor(worker) else id(worker)


def _future_of(answer: Any) -> Future[Any]:
    if hasattr(answer, "future"):
        answer = answer.future()
    return answer if isinstance(answer, Future) else settle(Future(), lambda: answer)
