"""The workers that were added to a callback: who they are, who takes part, and how each kind is called."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

import msgspec

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.controller.calls import Call, Postponed, Target, Waits, settle, wait_for
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import safe_name
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools import TOOLS

logger = logging.getLogger(__name__)

_NOBODY = (
    "no workers and no rollout were added to the callback, so nobody records: call "
    "add_workers(role, workers) or add_rollout(replicas) before the first step that is captured"
)
MANY_IN_TURN = 16


class _RayActor(Target):
    def __init__(self, role: str, first: int, handle: Any) -> None:
        super().__init__(role, first, 1, _identity_of(handle))
        self._handle = handle

    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        _check_in_cluster()
        return [getattr(self._handle, method).remote(*arguments).future()]


class _WorkerGroup(Target):
    """A group with verl's convention: ``execute_all_async(method, *args)`` returns a reference per worker.

    If the group itself has the method, it is called directly: its colocated workers use another name for it.
    """

    def __init__(self, role: str, group: Any) -> None:
        workers = list(getattr(group, "workers", None) or [group])
        size = getattr(group, "world_size", None)
        key = frozenset(_identity_of(worker) for worker in workers)
        super().__init__(role, 0, size if isinstance(size, int) else len(workers), key)
        self._group, self._has_actors = group, _is_actor(workers[0])

    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        if self._has_actors:
            _check_in_cluster()
        bound = getattr(self._group, method, None)
        answers = bound(*arguments) if bound else self._group.execute_all_async(method, *arguments)
        return [_future_of(answer) for answer in answers]


class _Local(Target):
    """A worker object of this process. Coroutines of several worker objects run concurrently.

    Plain methods run on the calling thread, one object after another.

    Args:
        role: Its role.
        first: Its index in the role.
        worker: The object.
        loop: Event loop of its coroutines; by default the caller's, or a new one.
        on_threads: Whether plain methods run on threads. So many objects of a role (over
            ``MANY_IN_TURN``) are proxies of other processes, which can answer concurrently.
    """

    is_local = True

    def __init__(
        self, role: str, first: int, worker: Any, loop: asyncio.AbstractEventLoop | None, on_threads: bool
    ) -> None:
        super().__init__(role, first, 1, id(worker))
        self._worker, self._loop, self._on_threads = worker, loop, on_threads

    def start(self, method: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        function = getattr(self._worker, method)
        if inspect.iscoroutinefunction(function):
            loop = self._loop or asyncio._get_running_loop()
            if loop is not None and loop.is_running():
                return [asyncio.run_coroutine_threadsafe(function(*arguments), loop)]
            return [Postponed(function(*arguments), loop)]
        call = partial(function, *arguments)
        return [_on_thread(call) if self._on_threads else settle(Future(), call)]


def make_targets(role: str, workers: Any, loop: asyncio.AbstractEventLoop | None = None) -> list[Target]:
    """Return the targets for the workers that a user added.

    Args:
        role: The role they are added under.
        workers: A worker group, a Ray actor handle, an object, or an iterable of the latter two.
        loop: Event loop on which local objects' coroutines run.

    Raises:
        ConfigError: There are no workers, or one has no capture methods.
    """
    if callable(getattr(workers, "execute_all_async", None)):
        return [_WorkerGroup(role, workers)]
    if _is_actor(workers) or hasattr(workers, "start_capture") or not isinstance(workers, Iterable):
        workers = [workers]
    targets: list[Target] = []
    workers = list(workers)
    for index, worker in enumerate(workers):
        if not hasattr(worker, "start_capture"):
            raise ConfigError(
                "",
                f"worker {index} of role {role!r} ({type(worker).__name__}) has no start_capture; "
                "let its class inherit a mixin of verl_profiling.workers",
            )
        if _is_actor(worker):
            targets.append(_RayActor(role, index, worker))
        else:
            targets.append(_Local(role, index, worker, loop, on_threads=len(workers) > MANY_IN_TURN))
    if not targets:
        raise ConfigError("", f"role {role!r} has no workers")
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


def _future_of(answer: Any) -> Future[Any]:
    future: Future[Any] = answer.future() if hasattr(answer, "future") else settle(Future(), lambda: answer)
    return future


def _on_thread(function: Callable[[], Any]) -> Future[Any]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="verl-profiling-call")
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future


class Roster:
    """The workers that were added, and which of them the settings select.

    Attributes:
        config: The settings.
        targets: All targets that were added.
        notes: Warnings on the settings, e.g. on a selected role without workers.
        owing: Targets that may still write files after a stop: artifacts are pending, or a reply is overdue.
        most_s: Upper limit of all timeouts, in seconds.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self.targets: list[Target] = []
        self.notes: list[str] = []
        self.owing: set[Target] = set()
        self.most_s = inf
        self.config = config
        self._is_checked = False

    def add(self, role: str, workers: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        """Register the workers of a role and replace its earlier ones; known workers get one role more.

        Raises:
            ConfigError: There are no workers, one has no capture methods, or the role's file names would be
                those of another role.
        """
        for other in self.roles:
            if other != role and safe_name(other) == safe_name(role):
                raise ConfigError(
                    "", f"roles {other!r} and {role!r} have files of the same names; rename one of them"
                )
        added = make_targets(role, workers, loop)
        self._is_checked = False
        self.config.for_role(role)  # imports its tools now, not in the first captured step
        for target in [target for target in self.targets if role in target.roles]:
            if target.roles != [role]:
                target.roles.remove(role)
                for worker in target.workers:
                    if not worker.identity.pid:  # it has not replied yet
                        worker.identity = msgspec.structs.replace(worker.identity, role=target.roles[0])
                continue
            self.targets.remove(target)
        by_key = {target.key: target for target in self.targets}
        for target in added:
            if (known := by_key.get(target.key)) is not None:
                known.roles.append(role)
            else:
                self.targets.append(target)

    @property
    def roles(self) -> list[str]:
        """The roles that have workers, each once."""
        return list(dict.fromkeys(role for target in self.targets for role in target.roles))

    def driven(self, selection: CaptureSelection | None) -> list[Target]:
        """Return the targets with at least one role enabled in a capture with this selection."""
        found = []
        for target in self.targets:
            for role in target.roles:
                if self.config.for_role(role, selection).enable:
                    found.append(target)
                    break
        return found

    def has_windows(self, target: Target, selection: CaptureSelection | None) -> bool:
        """Return whether a target records only during rollouts (an engine in discrete mode)."""
        return target.is_rollout and self.config.for_role(target.roles[0], selection).mode == "discrete"

    def check_request(self, selection: CaptureSelection, ranks: int | None = None) -> None:
        """Check that these workers can make a capture with this selection.

        Args:
            selection: The selection.
            ranks: The number of ranks, if other processes have some of them.

        Raises:
            ConfigError: They cannot; its key is a field of the selection.
        """
        roles = self.roles
        for role in selection.roles or ():
            if role not in roles:
                raise ConfigError("roles", f"no workers were added as {role!r}; {choices_hint(role, roles)}")
        allowed = {*TOOLS, *(name for role in ("", *roles) for name in self.config.tool_names(role))}
        for tool in selection.tools or ():
            if tool not in allowed:
                raise ConfigError("tools", f"unknown tool {tool!r}; {choices_hint(tool, allowed)}")
        for role in roles:
            self.config.for_role(role, selection)
        driven = self.driven(selection)
        if not driven:
            raise ConfigError("", "nobody would record: no worker has a role that takes part")
        engines = [target for target in driven if target.is_rollout]
        for key, numbers, having in (
            ("replicas", selection.replicas, engines),
            ("ranks", None if engines else selection.ranks, driven),
        ):
            present = [worker.number for target in having for worker in target.workers]
            count = ranks or max(present, default=-1) + 1
            if numbers and min(numbers) >= count:
                have = f"0 to {count - 1}" if count else "none"
                raise ConfigError(key, f"nobody has {', '.join(map(str, numbers))}; there are {have}")

    def check_selection(self, capturing: bool) -> None:
        """Warn of roles in the settings without workers; in a captured step, also if there are no workers."""
        if self._is_checked:
            return
        roles = self.roles
        self._is_checked = bool(roles) or capturing
        found = [_NOBODY] if capturing and not roles else []
        for key, named in (
            ("select.roles", self.config.select.roles or ()),
            ("roles", tuple(self.config.roles)),
        ):
            for role in named if roles else ():
                if role not in roles:
                    found.append(f"{key}: no workers were added as {role!r}; {choices_hint(role, roles)}")
        found += self.config.cautions(any(target.is_rollout for target in self.targets))
        for text in found:
            if text not in self.notes:
                logger.warning("%s", text)
        self.notes = found

    def finish(self, hooks_s: float) -> Waits[None]:
        """Wait until workers have compressed artifacts and run hooks, before Ray ends them with the loop."""
        timeouts = self.config.timeouts
        with_hooks = {role for hook in self.config.after.values() for role in hook.roles}
        targets = [one for one in self.targets if one in self.owing or with_hooks & {*one.roles}]
        wait_s = timeouts.finish_s + timeouts.start_s + hooks_s
        calls = self.call(targets, "stop_capture", None, timeouts.finish_s)
        for call in calls:
            call.timeout_s = min(wait_s, self.most_s)  # also if an earlier call is unanswered
        yield partial(wait_for, calls)
        self.owing.clear()

    def call(
        self, targets: Iterable[Target], method: str, *arguments: Any, timeout_s: float = 0.0
    ) -> list[Call]:
        """Call all workers; one with an unanswered earlier call is called too, but gets no timeout to wait.

        A capture request is sent with the roles under which the target was added.
        """
        calls: list[Call] = []
        for target in targets:
            if arguments and isinstance(request := arguments[0], CaptureRequest):
                arguments = (msgspec.structs.replace(request, roles=list(target.roles)),)
            calls += target.call(method, *arguments)
        for call in calls:
            earlier, call.worker.last_call = call.worker.last_call, call.future
            is_busy = earlier is not None and not earlier.done()
            call.timeout_s = 0.0 if is_busy else min(timeout_s, self.most_s)
        return calls
