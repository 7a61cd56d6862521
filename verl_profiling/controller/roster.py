"""The workers of a callback, and their selection by the settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from math import inf
from typing import Any

import msgspec

from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture.session import named_stages
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.controller.worker_calls import Call, Target, Waits, make_targets, wait_for
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import WorkerIdentity, safe_name
from verl_profiling.manifest import CaptureResult, StageSpan
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.roles import TRAJECTORIES
from verl_profiling.tools import TOOLS

logger = logging.getLogger(__name__)

_NOBODY = (
    "no workers and no rollout were added to the callback, so nothing is recorded: call "
    "add_workers(role, workers) or add_rollout(replicas) before the first step that is captured"
)


class Roster:
    """All workers of a callback, and their selection by the settings.

    Attributes:
        config: The settings.
        targets: The added workers. A target is one worker, or a group that is called as a whole.
        notes: Warnings on the settings, e.g. on a selected role without workers.
        owing: Targets that may still write files after a stop: artifacts are pending, or a reply is
            late.
        most_s: Upper limit (s) of all timeouts; infinite until the process exits.
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
            if target.roles == [role]:
                self.targets.remove(target)
                continue
            target.roles.remove(role)
            for worker in target.workers:
                if not worker.identity.pid:  # it has not replied yet
                    worker.identity = msgspec.structs.replace(worker.identity, role=target.roles[0])
        by_key = {target.key: target for target in self.targets}
        for target in added:
            if target.key in by_key:
                by_key[target.key].roles.append(role)
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
            selection: Changes of the settings by a capture request; ``None`` without any.
            windowed: ``True`` for the targets that record only during rollouts (engines in discrete
                mode), ``False`` for others.
        """
        driven = []
        for target in self.targets:
            first = self.config.for_role(target.roles[0], selection)
            has_windows = target.is_rollout and first.mode == "discrete"
            if windowed not in (None, has_windows):
                continue
            if any(self.config.for_role(role, selection).enable for role in target.roles):
                driven.append(target)
        return driven

    def count(self, selection: CaptureSelection | None) -> int:
        """Return the number of workers in a capture with this selection."""
        return sum(len(target.workers) for target in self.driven(selection))

    def check_request(self, selection: CaptureSelection, ranks: int | None = None) -> None:
        """Check that the workers can make a capture with a selection.

        Args:
            selection: Changes of the settings by a capture request.
            ranks: The number of ranks in a loop with several ranks, whose workers are in other
                processes too.

        Raises:
            ConfigError: The workers cannot; the key of the error is a field of the selection.
        """
        for role in selection.roles or ():
            if problem := self._without_workers(role):
                raise ConfigError("roles", problem)
        tools = {*TOOLS}
        for role in ("", *self.roles):
            tools.update(self.config.tool_names(role))
        for tool in selection.tools or ():  # first, as it is imported below
            if tool not in tools:
                raise ConfigError("tools", f"unknown tool {tool!r}; {choices_hint(tool, tools)}")
        for role in self.roles:
            self.config.for_role(role, selection)
        driven = self.driven(selection)
        if not driven:
            raise ConfigError("", "nothing would be recorded: no worker has an enabled role")
        engines = [target for target in driven if target.is_rollout]
        _check_numbers("replicas", selection.replicas, engines, ranks)
        if not engines:  # a worker of an engine is a whole replica, with ranks inside
            _check_numbers("ranks", selection.ranks, driven, ranks)

    def _without_workers(self, role: str) -> str:
        """Return a clause on a role that has no workers; empty if the role has workers."""
        if role in self.roles:
            return ""
        return f"no workers were added as {role!r}; {choices_hint(role, self.roles)}"

    def check_selection(self, capturing: bool) -> None:
        """Warn of roles in the settings without workers; in a captured step,
        also if there are no workers.
        """
        if self._is_checked:
            return
        roles = self.roles
        self._is_checked = bool(roles) or capturing
        notes = []
        if not roles and capturing:
            notes.append(_NOBODY)
        if roles:
            for key, named in (
                ("select.roles", self.config.select.roles or ()),
                ("roles", self.config.roles),
            ):
                problems = filter(None, map(self._without_workers, named))
                notes += [f"{key}: {problem}" for problem in problems]
        notes += self.config.cautions(any(target.is_rollout for target in self.targets))
        for text in notes:
            if text not in self.notes:
                logger.warning("%s", text)
        self.notes = notes

    def check_results(
        self,
        results: Iterable[CaptureResult],
        stages: Iterable[StageSpan],
        selection: CaptureSelection | None,
    ) -> None:
        """Log workers that recorded with another role or other settings than the callback's.

        Each is logged once. The roles that recorded and the names of stages are kept for the end of
        training, when the settings that no worker matched are logged.

        Args:
            results: Replies of the workers to the stop of a capture.
            stages: The loop's stages in the capture.
            selection: Changes of the settings for this capture; ``None`` without any.
        """
        self._check_roles()
        self._marked |= {span.name for span in stages}
        for result in results:
            if result.status == "skipped":
                continue
            self._recorded |= {result.identity.role, *result.roles}
            self._marked |= {span.name for span in result.stages}
            config = self.config
            if TRAJECTORIES in result.tools:  # AgentLoopCaptureMixin adds this tool by itself
                config = config.with_trajectories(result.identity.role)
            here = config.for_role(result.identity.role, selection)
            if result.mode != here.mode or not {*result.tools} <= {*here.tool_names}:
                self._say(
                    f"{result.name} recorded {result.mode} with {' and '.join(result.tools)}, and "
                    f"the callback's settings for the role are {here.mode} with "
                    f"{' and '.join(here.tool_names)}",
                    "pass the same settings to init_capture",
                )

    def _check_roles(self) -> None:
        """Log workers that replied with another role than that of ``add_workers``.

        Roles that share a process reply with one role. It is right if any worker of the process was
        added under it.
        """
        workers = [worker for target in self.targets for worker in target.workers]
        processes: set[tuple[str, object]] = set()
        for worker in workers:
            process = _process_of(worker.identity)
            processes.update((role, process) for role in worker.target.roles)
        for worker in workers:
            identity = worker.identity
            if (identity.role, _process_of(identity)) not in processes:
                self._say(
                    f"{identity} was added as {worker.target.roles[0]!r}",
                    f"its settings and files are those of {identity.role!r}; pass the same role to "
                    "add_workers and to init_capture",
                )

    def _check_stages(self) -> None:
        """Log stages that the settings select, but that no captured step had.

        Roles that never recorded are left out, and so are stages that code of this process names:
        these may run in other steps.
        """
        marked = self._marked | named_stages()
        selected = {}
        if self._recorded:
            selected["select.stages"] = self.config.select.stages
        for role, override in self.config.roles.items():
            if role in self._recorded:
                selected[f"roles.{role}.stages"] = override.stages
        for key, names in selected.items():
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
        """Wait for compression and ``after`` hooks of workers, before Ray ends the workers."""
        self._check_stages()
        timeouts = self.config.timeouts
        with_hooks = {role for hook in self.config.after.values() for role in hook.roles}
        targets = [
            target
            for target in self.targets
            if target in self.owing or with_hooks & {*target.roles}
        ]
        wait_s = timeouts.finish_s + timeouts.start_s + hooks_s
        calls = self.call(targets, "stop_capture", None, timeouts.finish_s)
        for call in calls:
            call.timeout_s = min(wait_s, self.most_s)  # also if an earlier call is unanswered
        yield partial(wait_for, calls)
        self.owing.clear()

    def call(
        self, targets: Iterable[Target], method: str, *arguments: Any, timeout_s: float = 0.0
    ) -> list[Call]:
        """Call a method of all workers of some targets, without waiting; return the calls.

        A worker that has not replied to an earlier call gets no timeout, so it is not waited for. A
        capture request is sent with the roles of the target.
        """
        calls: list[Call] = []
        for target in targets:
            if arguments and isinstance(request := arguments[0], CaptureStart):
                arguments = (msgspec.structs.replace(request, roles=list(target.roles)),)
            calls += target.call(method, *arguments)
        for call in calls:
            earlier = call.worker.last_call
            if earlier is None or earlier.done():
                call.worker.last_call = call.future
                call.timeout_s = min(timeout_s, self.most_s)
        return calls


def _check_numbers(
    key: str, numbers: tuple[int, ...] | None, targets: list[Target], ranks: int | None
) -> None:
    """Refuse ranks or replicas of a request if no worker has any of them.

    Raises:
        ConfigError: All numbers are too large; see :meth:`Roster.check_request`.
    """
    present = [worker.number for target in targets for worker in target.workers]
    count = ranks or max(present, default=-1) + 1
    if numbers and min(numbers) >= count:
        have = f"0 to {count - 1}" if count else "none"
        raise ConfigError(key, f"no worker has {', '.join(map(str, numbers))}; there are {have}")


def _process_of(identity: WorkerIdentity) -> tuple[str, str, int]:
    return identity.host, identity.namespace, identity.pid
