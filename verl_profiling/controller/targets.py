"""The kinds of workers that the callback can call: Ray actors, worker groups and local objects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from typing import Any

from verl_profiling.controller.calls import Postponed, Target
from verl_profiling.errors import ConfigError

__all__ = ["make_targets"]

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
