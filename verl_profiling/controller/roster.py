"""The workers that were added to a callback, and the calls to them."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Iterable
from concurrent.futures import wait
from math import inf
from typing import Any

import msgspec

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture_request import Aim
from verl_profiling.controller.targets import Call, Postponed, Round, Target, Waits, Worker, make_targets
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import ProcessId, WorkerIdentity, safe_name
from verl_profiling.ranks import process_rank
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.tools import TOOLS
from verl_profiling.watch.reading import WatchQuestion, WatchReading

__all__ = ["Roster"]

_ANSWER_S = 1.0
_NOBODY = (
    "no workers and no rollout were added to the callback, so nobody records: call "
    "add_workers(role, workers) or add_rollout(replicas) before the first step that is captured"
)


class Roster:
    """Knows the workers, which of them the settings select, and who has not answered yet.

    Attributes:
        targets: All that were added.
        known: Who a worker said that it is.
        most_s: Seconds that anybody is waited for at most.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self.targets: list[Target] = []
        self.known: dict[Worker, WorkerIdentity] = {}
        self.most_s = inf
        self._config = config
        self._unanswered: list[Call] = []

    def add(self, role: str, workers: Any, loop: AbstractEventLoop | None) -> None:
        """Register workers, in the place of those that the role has; others of them get one name more.

        Raises:
            ConfigError: There are none, the role's files would have the names of another's, or one has no
                capture methods.
        """
        for other in self.roles:
            if other != role and safe_name(other) == safe_name(role):
                raise ConfigError(
                    "", f"roles {other!r} and {role!r} have files of the same names; rename one of them"
                )
        added = make_targets(role, workers, loop)
        self._config.for_role(role)  # its tools are imported now, and not in the first captured step
        for target in [target for target in self.targets if role in target.roles]:
            if target.roles != [role]:
                target.roles.remove(role)
                continue
            self.targets.remove(target)
            for number in range(target.size):
                self.known.pop((target, number), None)
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

    def identity_here(self) -> WorkerIdentity:
        """Return who this process is in manifests, as a rank of a loop: its first worker, engines last."""
        here = sorted(
            (target for target in self.driven(None) if target.is_local), key=lambda one: one.is_rollout
        )
        for target in here:
            for call in target.call("read_watch", WatchQuestion()):
                if isinstance(call.future, Postponed):
                    call.future.fail(RuntimeError("it is a coroutine, and nobody waits for it"))
                wait([call.future], _ANSWER_S)
                reading = call.reply()
                if isinstance(reading, WatchReading) and reading.process == ProcessId.current():
                    return reading.identity
        role = here[0].roles[0] if here else "controller"
        return WorkerIdentity(role=role, rank=(process_rank() or (0, 1))[0])

    def driven(self, aim: Aim | None) -> list[Target]:
        """Return those of which a role is switched on, in a capture with this aim."""
        return [t for t in self.targets if any(self._config.for_role(role, aim).enable for role in t.roles)]

    def has_windows(self, target: Target, aim: Aim | None) -> bool:
        """Return whether it is recorded from the begin of a rollout to its end, not for the whole step."""
        return target.is_rollout and self._config.for_role(target.roles[0], aim).mode == "discrete"

    def check_aim(self, aim: Aim, ranks: int | None = None) -> None:
        """Check that a capture with this aim can be had of these workers.

        Args:
            aim: The aim.
            ranks: How many ranks there are, where other processes have some of them.

        Raises:
            ConfigError: It cannot; the key is the aim's.
        """
        roles = self.roles
        for role in aim.roles or ():
            if role not in roles:
                raise ConfigError("roles", f"no workers were added as {role!r}; {choices_hint(role, roles)}")
        allowed = {*TOOLS, *(name for role in ("", *roles) for name in self._config.tool_names(role))}
        for tool in aim.tools or ():
            if tool not in allowed:
                raise ConfigError("tools", f"unknown tool {tool!r}; {choices_hint(tool, allowed)}")
        for role in roles:
            self._config.for_role(role, aim)
        driven = self.driven(aim)
        if not driven:
            raise ConfigError("", "nobody would record: no worker has a role that takes part")
        engines = [target for target in driven if target.is_rollout]
        self._check_numbers("replicas", aim.replicas, ranks or _count(engines))
        if not engines:
            self._check_numbers("ranks", aim.ranks, ranks or _count(driven))

    @staticmethod
    def _check_numbers(key: str, numbers: tuple[int, ...] | None, count: int) -> None:
        """Check that one of them is the number of a worker."""
        if numbers and not any(number < count for number in numbers):
            have = f"0 to {count - 1}" if count else "none"
            raise ConfigError(key, f"nobody has {', '.join(map(str, numbers))}; there are {have}")

    def runs_hooks(self, target: Target) -> bool:
        """Return whether a hook of the settings runs on it."""
        return any(role in hook.roles for hook in self._config.after.values() for role in target.roles)

    def cautions(self, capturing: bool) -> list[str]:
        """Return what the settings select and nobody has; for a captured step, also that nobody is there."""
        roles = self.roles
        found = [_NOBODY] if capturing and not roles else []
        for key, named in (
            ("select.roles", self._config.select.roles or ()),
            ("roles", tuple(self._config.roles)),
        ):
            for role in named if roles else ():
                if role not in roles:
                    found.append(f"{key}: no workers were added as {role!r}; {choices_hint(role, roles)}")
        found += self._config.cautions(any(target.is_rollout for target in self.targets))
        return found

    def send(self, targets: Iterable[Target], method: str, *arguments: Any) -> list[Call]:
        """Call all workers. One that has not answered yet gets the call too, and is not waited for."""
        busy = {call.worker for call in self._unanswered if not call.future.done()}
        calls = [
            call
            for target in targets
            for call in target.call(method, *(_addressed(argument, target) for argument in arguments))
        ]
        for call in calls:
            call.awaited = call.worker not in busy
        return calls

    def ask(self, targets: Iterable[Target], method: str, argument: Any, timeout_s: float) -> Waits[Round]:
        """Call all workers, and wait for their answers."""
        round_ = Round(self.send(targets, method, argument), min(timeout_s, self.most_s))
        yield round_.wait
        self.remember_unanswered(round_)
        return round_

    def remember_unanswered(self, round_: Round) -> None:
        """Keep in mind the calls that nobody waits for any longer."""
        calls = [*self._unanswered, *round_.calls]
        self._unanswered = [call for call in calls if not call.future.done()]


def _count(targets: list[Target]) -> int:
    return max((target.first + target.size for target in targets), default=0)


def _addressed(argument: Any, target: Target) -> Any:
    """Return an argument of a call; a request says under which roles the worker was added."""
    if isinstance(argument, CaptureRequest):
        return msgspec.structs.replace(argument, roles=list(target.roles))
    return argument
