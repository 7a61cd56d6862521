"""The processes of a verl run: their capture methods, and where a trainer holds their handles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.integrations.hooks import misfits
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers import AgentLoopCaptureMixin

_METHODS = ("start_capture", "stop_capture", "read_watch")
_GROUPS = (("actor", "actor_rollout_wg"), ("ref", "ref_policy_wg"), ("critic", "critic_wg"))
_NO_METHODS = (
    "its workers have no capture methods; let their class inherit verl's own, or a mixin of "
    "verl_profiling.workers"
)
AGENT_LOOP, REWARD, ROLLOUTER = "agent_loop", "reward", "rollouter"


def add_capture_methods(
    cls: type[Any],
    default: Any = None,
    *,
    awaited: bool = False,
    registered: Callable[[Any], Any] = lambda method: method,
) -> None:
    """Add the methods that the callback calls; each delegates to the object's ``_verl_profiling``.

    Args:
        cls: A class of verl, before ``ray.remote`` makes an actor of it.
        default: The mixin that replies until a process is set up.
        awaited: Whether the methods are coroutines. If not, the event loop's thread starts and stops a
            recording.
        registered: verl's decorator for each method.
    """
    for name in _METHODS:
        setattr(cls, name, registered((_awaited if awaited else _called)(name)))
    if default is not None:
        cls._verl_profiling = default


def _called(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._verl_profiling, name)(*args, **kwargs)

    return method


def _awaited(name: str) -> Callable[..., Any]:
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = getattr(self._verl_profiling, name)(*args, **kwargs)
        return await reply if inspect.isawaitable(reply) else reply

    return method


def add_actor_methods(actor_class: type[Any], role: str) -> None:
    """Add the capture methods and ``init_capture`` to a class of plain Ray actors."""

    def init_capture(self: Any, settings: ProfilingConfig, rank: int, world_size: int) -> list[str]:
        """Set this worker up; return the parts that are not recorded in its process."""
        self._verl_profiling = AgentLoopCaptureMixin()
        self._verl_profiling.init_capture(settings, role=role, rank=rank, world_size=world_size)
        return misfits()

    actor_class.init_capture = init_capture
    add_capture_methods(actor_class, AgentLoopCaptureMixin())


class Processes:
    """The processes that are captured.

    Args:
        callback: The trainer's callback, to which they are added.
        settings: What to profile.

    Attributes:
        misfits: The parts that are not recorded, each with the reason.
    """

    def __init__(
        self, callback: ProfilingCallback | AsyncProfilingCallback, settings: ProfilingConfig
    ) -> None:
        self._callback = callback
        self._settings = settings
        self.misfits: list[str] = []

    def add(self, trainer: Any, agent_loops: Any) -> None:
        """Add the processes of a trainer and, if it has one, of its rollouter.

        Args:
            trainer: The trainer.
            agent_loops: The trainer's agent loop manager.
        """
        self._add_groups(trainer)
        rollouter = getattr(trainer, "rollouter", None)
        if self._settings.for_role("rollout").enable:
            self._add_servers(trainer, rollouter)
        if rollouter is None:
            self._add_rollout_processes(*rollout_processes(trainer, agent_loops))
        elif hasattr(rollouter, "rollout_processes"):
            import ray

            self._add_rollout_processes(*ray.get(rollouter.rollout_processes.remote()))
            self.add_actors(ROLLOUTER, [rollouter])

    def add_actors(self, role: str, handles: Sequence[Any]) -> None:
        """Set actors up and add them to the callback, if all of them can be captured.

        Args:
            role: Their role.
            handles: Their handles, in order of rank.
        """
        if not handles or not self._settings.for_role(role).enable:
            return
        if not all(hasattr(handle, "init_capture") for handle in handles):
            self._leave_out(role, _NO_METHODS)
            return
        try:
            import ray

            # Training waits for these actors as well, however long they take to come up.
            size = len(handles)
            calls = [
                handle.init_capture.remote(self._settings, rank=rank, world_size=size)
                for rank, handle in enumerate(handles)
            ]
            self.misfits += _joined(ray.get(calls))
        except Exception as error:
            self._leave_out(role, f"{type(error).__name__}: {error}")
            return
        self._callback.add_workers(role, handles)

    def _leave_out(self, role: str, why: str) -> None:
        self.misfits.append(f"not recorded: the role {role}, because {why}")

    def _add_groups(self, trainer: Any) -> None:
        """Add the worker groups; of groups that share processes, a profiled one comes first."""
        groups = [(role, getattr(trainer, name)) for role, name in _GROUPS if hasattr(trainer, name)]
        groups.sort(key=lambda item: not self._settings.for_role(item[0]).enable)
        set_up: list[Any] = []
        for role, group in groups:
            if not hasattr(group, "init_capture"):
                self._leave_out(role, _NO_METHODS)
                continue
            if not any(group is other for other in set_up):
                self.misfits += _joined(group.init_capture(self._settings, role))
                set_up.append(group)
            self._callback.add_workers(role, group)

    def _add_servers(self, trainer: Any, rollouter: Any) -> None:
        """Add the rollout servers, if they have the capture methods."""
        import ray

        try:
            replicas = _replicas(trainer) if rollouter is None else ray.get(rollouter.get_replicas.remote())
            servers = [replica.servers[0] for replica in replicas]
            if not servers:
                return
            self.misfits += _joined(ray.get([server.capture_misfits.remote() for server in servers]))
        except AttributeError as error:
            self._leave_out("rollout", f"its servers do not fit ({error})")
            return
        self._callback.add_rollout(servers)

    def _add_rollout_processes(self, loops: list[Any], scorers: list[Any]) -> None:
        """Add the agent loop workers and the reward loop workers."""
        self.add_actors(AGENT_LOOP, loops)
        self.add_actors(REWARD, scorers)


def rollout_processes(owner: Any, agent_loops: Any) -> tuple[list[Any], list[Any]]:
    """Return the handles of the agent loop workers, and of the reward loop workers.

    Args:
        owner: A trainer or a rollouter.
        agent_loops: The owner's agent loop manager.
    """
    rewards = getattr(owner, "reward_loop_manager", None)
    return (
        list(getattr(agent_loops, "agent_loop_workers", None) or ()),
        list(getattr(rewards, "reward_loop_workers", None) or ()),
    )


def _replicas(trainer: Any) -> list[Any]:
    """Return a trainer's rollout replicas; in each, the first node's server acts for the other nodes."""
    if hasattr(trainer, "_rollout_server_managers"):
        managers = trainer._rollout_server_managers()
    else:  # V0 trainers, and verl 0.9.0
        named = ("llm_server_manager", "standalone_server_manager")
        managers = [getattr(trainer, name) for name in named if hasattr(trainer, name)]
    return [replica for manager in managers for replica in manager.get_replicas()]


def _joined(replies: Iterable[Sequence[str] | None]) -> list[str]:
    """Return the sentences from the replies of several processes."""
    return [text for reply in replies for text in reply or ()]
