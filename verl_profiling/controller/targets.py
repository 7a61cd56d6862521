"""The workers of a callback: the selection that takes part in a capture, and the calls to them.

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
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec

from verl_profiling import clock
from verl_profiling.capture.protocol import CaptureRequest
from verl_profiling.capture.session import named_stages
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import ROLLOUT_ROLE, WorkerIdentity, safe_name
from verl_profiling.manifest import CaptureResult, StageSpan
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools import TOOLS

T = TypeVar("T")
Waits = Generator[Callable[[], object], None, T]
"""A hook as a generator of blocking functions, which the asynchronous callback runs on a thread."""

Send = Callable[..., list[Future[Any]]]

logger = logging.getLogger(__name__)

_NOBODY = (
    "no workers and no rollout were added to the callback, so nothing is recorded: call "
    "add_workers(role, workers) or add_rollout(replicas) before the first step that is captured"
)


class Worker:
    """One worker of a target.

    Attributes:
        target: The target that the worker belongs to.
        number: The worker's index in the role.
        identity: Identity of the worker in its last reply; before the first reply, an identity made
            from the target.
        last_call: Future of the last call; the worker is busy until the future is done.
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
        sent_ns: Time of sending, on the controller's clock.
        returned_ns: Arrival of the reply or error, on the controller's clock; 0 before.
        timeout_s: Timeout of the reply (s); 0 if the worker is still busy with an earlier call.
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
        return self.future.result() if self.future.done() and self.error is None else None

    def problem(self) -> str:
        """Return in one line why there is no valid reply."""
        if not self.future.done():
            if not self.timeout_s:
                return (
                    f"{self.method} was not waited for: the worker still owes the reply "
                    "to an earlier call"
                )
            return (
                f"{self.method} did not return within {self.timeout_s:g} s; is the worker "
                "hung or busy?"
            )
        error = self.error
        if error is None:
            answer = type(self.future.result()).__name__
            return (
                f"{self.method} returned {answer}, which is no reply to the callback; "
                "let the worker's class inherit a mixin of verl_profiling.workers"
            )
        cause = getattr(error, "cause", None) or error
        lines = str(cause).strip().splitlines() or [""]
        return f"{self.method} raised {type(cause).__name__}: {lines[0]}"


class Postponed(Future[Any]):
    """The future of a coroutine function that :func:`wait_for` calls on its own thread.

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
        late = f"the coroutine did not return within {timeout_s:g} s, and was cancelled"
        running = _run(together, deadline_s, late if loop is None else "")
        try:
            asyncio.run(running) if loop is None else loop.run_until_complete(running)
        except Exception as error:
            running.close()
            for future, _ in together:
                future.fail(error)
    concurrent.futures.wait(awaited, max(0.0, deadline_s - time.monotonic()))


async def _run(together: list[tuple[Postponed, bool]], deadline_s: float, late: str) -> None:
    """Run coroutines until the deadline; unfinished ones continue
    when the caller's event loop runs again.
    """
    tasks = [(asyncio.ensure_future(future.run()), is_awaited) for future, is_awaited in together]
    if awaited := [task for task, is_awaited in tasks if is_awaited]:
        await asyncio.wait(awaited, timeout=max(0.0, deadline_s - time.monotonic()))
    for future, _ in together if late else ():
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
        self.key, self.is_local = key, is_local
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
    worker: Any, own: asyncio.AbstractEventLoop | None, method: str, *arguments: Any
) -> list[Future[Any]]:
    """Call an object of this process. Coroutines of several objects run concurrently.

    Plain methods run on the calling thread, one object after another.

    Args:
        worker: The object.
        own: Event loop of the object's coroutines; by default the caller's, or a new event loop.
        method: The method.
        *arguments: Its arguments.
    """
    call = partial(getattr(worker, method), *arguments)
    if inspect.iscoroutinefunction(call.func):
        loop = own or asyncio._get_running_loop()
        if loop is not None and loop.is_running():
            return [asyncio.run_coroutine_threadsafe(call(), loop)]
        return [Postponed(call, loop)]
    return [settle(Future(), call)]


def make_targets(
    role: str, workers: Any, loop: asyncio.AbstractEventLoop | None = None
) -> list[Target]:
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
                f"worker {index} of role {role!r} ({type(worker).__name__}) is no object or "
                "actor handle "
                "with start_capture; let its class inherit a mixin of verl_profiling.workers",
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


def _process_of(identity: WorkerIdentity) -> tuple[str, str, int]:
    return identity.host, identity.namespace, identity.pid


def _future_of(answer: Any) -> Future[Any]:
    future: Future[Any] = (
        answer.future() if hasattr(answer, "future") else settle(Future(), lambda: answer)
    )
    return future


class Roster:
    """All workers of a callback, and their selection by the settings.

    Attributes:
        config: The settings.
        targets: All targets that were added.
        notes: Warnings on the settings, e.g. on a selected role without workers.
        owing: Targets that may still write files after a stop: artifacts are pending, or a reply is
            late.
        most_s: Upper limit of all timeouts, in seconds.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self.targets: list[Target] = []
        self.notes: list[str] = []
        self.owing: set[Target] = set()
        self.most_s = inf
        self.config = config
        self._is_checked = False
        self._said: set[str] = set()
        self._recorded: set[str] = set()  # roles that recorded in a capture
        self._marked: set[str] = set()  # stages in the captures

    def add(self, role: str, workers: Any, loop: asyncio.AbstractEventLoop | None) -> None:
        """Register the workers of a role, and replace its earlier workers; known workers get a
        further role.

        Raises:
            ConfigError: There are no workers, a worker has no capture methods, or two roles would
                have the same file names.
        """
        for other in self.roles:
            if other != role and safe_name(other) == safe_name(role):
                raise ConfigError(
                    "",
                    f"roles {other!r} and {role!r} have files of the same names; rename one "
                    "of them",
                )
        added = make_targets(role, workers, loop)
        self._is_checked = False
        self.config.for_role(role)  # imports its tools now, not in the first captured step
        for target in [target for target in self.targets if role in target.roles]:
            if target.roles != [role]:
                target.roles.remove(role)
                for worker in target.workers:
                    if not worker.identity.pid:  # it has not replied yet
                        worker.identity = msgspec.structs.replace(
                            worker.identity, role=target.roles[0]
                        )
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

    def driven(
        self, selection: CaptureSelection | None, windowed: bool | None = None
    ) -> list[Target]:
        """Return the targets with at least one role enabled in a capture with this selection.

        Args:
            selection: The selection.
            windowed: ``True`` for the targets that record only during rollouts (engines in discrete
                mode), ``False`` for others.
        """
        found = []
        for target in self.targets:
            first = self.config.for_role(target.roles[0], selection)
            has_windows = target.is_rollout and first.mode == "discrete"
            for role in target.roles:
                if windowed in (None, has_windows) and self.config.for_role(role, selection).enable:
                    found.append(target)
                    break
        return found

    def check_request(self, selection: CaptureSelection, ranks: int | None = None) -> None:
        """Check that the workers can make a capture with a selection.

        Args:
            selection: The selection.
            ranks: The number of ranks in a loop with several ranks, whose workers are in other
                processes too.

        Raises:
            ConfigError: The workers cannot; the key of the error is a field of the selection.
        """
        roles = self.roles
        for role in selection.roles or ():
            if role not in roles:
                raise ConfigError(
                    "roles", f"no workers were added as {role!r}; {choices_hint(role, roles)}"
                )
        allowed = {
            *TOOLS,
            *(name for role in ("", *roles) for name in self.config.tool_names(role)),
        }
        for tool in selection.tools or ():
            if tool not in allowed:
                raise ConfigError("tools", f"unknown tool {tool!r}; {choices_hint(tool, allowed)}")
        for role in roles:
            self.config.for_role(role, selection)
        driven = self.driven(selection)
        if not driven:
            raise ConfigError("", "nothing would be recorded: no worker has an enabled role")
        engines = [target for target in driven if target.is_rollout]
        for key, numbers, having in (
            ("replicas", selection.replicas, engines),
            ("ranks", None if engines else selection.ranks, driven),
        ):
            present = [worker.number for target in having for worker in target.workers]
            count = ranks or max(present, default=-1) + 1
            if numbers and min(numbers) >= count:
                have = f"0 to {count - 1}" if count else "none"
                raise ConfigError(
                    key, f"no worker has {', '.join(map(str, numbers))}; there are {have}"
                )

    def check_selection(self, capturing: bool) -> None:
        """Warn of roles in the settings without workers; in a captured step,
        also if there are no workers.
        """
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
                    found.append(
                        f"{key}: no workers were added as {role!r}; {choices_hint(role, roles)}"
                    )
        found += self.config.cautions(any(target.is_rollout for target in self.targets))
        for text in found:
            if text not in self.notes:
                logger.warning("%s", text)
        self.notes = found

    def check_results(
        self,
        results: Iterable[CaptureResult],
        stages: Iterable[StageSpan],
        selection: CaptureSelection | None,
    ) -> None:
        """Log once which workers have another role or other settings; collect the roles and stages.

        Args:
            results: The results of the workers.
            stages: The stages of the loop.
            selection: The selection of the capture.
        """
        self._check_roles()
        self._marked |= {span.name for span in stages}
        for result in results:
            if result.status == "skipped":
                continue
            self._recorded |= {result.identity.role, *result.roles}
            self._marked |= {span.name for span in result.stages}
            own = self.config.for_role(result.identity.role, selection)
            if result.mode != own.mode or not {*result.tools} <= {*own.tool_names}:
                self._say(
                    f"{result.name} recorded {result.mode} with "
                    f"{' and '.join(result.tools)}, and the "
                    f"callback's settings for the role are {own.mode} with "
                    f"{' and '.join(own.tool_names)}",
                    "pass the same settings to init_capture",
                )

    def _check_roles(self) -> None:
        """Log workers that replied with another role than that of ``add_workers``.

        Roles that share a process reply with one role, under which one of them was added.
        """
        workers = [worker for target in self.targets for worker in target.workers]
        processes = {
            (role, _process_of(worker.identity))
            for worker in workers
            for role in worker.target.roles
        }
        for worker in workers:
            identity = worker.identity
            if (identity.role, _process_of(identity)) not in processes:
                self._say(
                    f"{identity} was added as {worker.target.roles[0]!r}",
                    f"its settings and files are those of {identity.role!r}; pass the same role to "
                    "add_workers and to init_capture",
                )

    def _check_stages(self) -> None:
        """Log selected stages that nothing is known of, in roles that recorded.

        A stage that code of this process names may be in other steps than the captured ones.
        """
        marked = self._marked | named_stages()
        named = [("select.stages", self.config.select.stages)] if self._recorded else []
        for role, override in self.config.roles.items():
            if role in self._recorded:
                named.append((f"roles.{role}.stages", override.stages))
        for key, names in named:
            for name in {*(names or ())} - marked:
                self._say(
                    f"{key}: nothing marked the stage {name!r} in a captured step",
                    choices_hint(name, marked),
                )

    def _say(self, problem: str, remedy: str) -> None:
        """Log a problem once."""
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("%s; %s", problem, remedy)

    def finish(self, hooks_s: float) -> Waits[None]:
        """Wait for compression and hooks of workers, before Ray ends the workers."""
        self._check_stages()
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
        """Call all workers; workers that still owe the reply to an earlier call are not waited for.

        A capture request is sent with the roles of the target.
        """
        calls: list[Call] = []
        for target in targets:
            if arguments and isinstance(request := arguments[0], CaptureRequest):
                arguments = (msgspec.structs.replace(request, roles=list(target.roles)),)
            calls += target.call(method, *arguments)
        for call in calls:
            earlier = call.worker.last_call
            if not (is_busy := earlier is not None and not earlier.done()):
                call.worker.last_call = call.future
            call.timeout_s = 0.0 if is_busy else min(timeout_s, self.most_s)
        return calls
