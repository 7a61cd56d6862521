"""Finds what a trainer's run consists of, and adds it to the callback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_profiling.controller.callback import AsyncProfilingCallback, ProfilingCallback
from verl_profiling.integrations.verl_actors import add_actors
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Targets"]

_GROUPS = (("actor", "actor_rollout_wg"), ("ref", "ref_policy_wg"), ("critic", "critic_wg"))
_AGENT_LOOPS, _REWARDS, _ROLLOUTER = "agent_loop", "reward", "rollouter"


class Targets:
    """The processes that are captured.

    Args:
        callback: The trainer's callback.
        settings: What to profile.

    Attributes:
        agent_loops: Handles of the processes that run trajectories, if they are captured.
        misfits: What is not recorded, each with the reason.
    """

    def __init__(
        self, callback: ProfilingCallback | AsyncProfilingCallback, settings: ProfilingConfig
    ) -> None:
        self._callback = callback
        self._settings = settings
        self.agent_loops: list[Any] = []
        self.misfits: list[str] = []

    def add(self, trainer: Any, agent_loops: Any) -> None:
        """Add what a trainer has, or its rollouter has for it.

        Args:
            trainer: The trainer.
            agent_loops: What it has its trajectories made by.
        """
        self._add_groups(trainer)
        rollouter = getattr(trainer, "rollouter", None)
        if self._settings.for_role("rollout").enable:
            self._add_servers(trainer, rollouter)
        if rollouter is None:
            rewards = getattr(trainer, "reward_loop_manager", None)
            self._add_rollout_processes(
                list(getattr(agent_loops, "agent_loop_workers", None) or ()),
                list(getattr(rewards, "reward_loop_workers", None) or ()),
            )
        elif hasattr(rollouter, "rollout_processes"):
            import ray

            self._add_rollout_processes(*ray.get(rollouter.rollout_processes.remote()))
            add_actors(self._callback, self._settings, _ROLLOUTER, [rollouter], self.misfits)

    def _add_groups(self, trainer: Any) -> None:
        """Add worker groups; of those that share processes, first one that is profiled."""
        groups = [(role, getattr(trainer, name)) for role, name in _GROUPS if hasattr(trainer, name)]
        groups.sort(key=lambda item: not self._settings.for_role(item[0]).enable)
        told: list[Any] = []
        for role, group in groups:
            if not hasattr(group, "init_capture"):
                self.misfits.append(
                    f"the role {role}: not recorded, because its workers have no capture methods"
                )
                continue
            if not any(group is other for other in told):
                self.misfits += _each(group.init_capture(self._settings, role))
                told.append(group)
            self._callback.add_workers(role, group)

    def _add_servers(self, trainer: Any, rollouter: Any) -> None:
        """Add the rollout servers, if they have been started so that they can be captured."""
        import ray

        try:
            replicas = _replicas(trainer) if rollouter is None else ray.get(rollouter.get_replicas.remote())
            servers = [replica.servers[0] for replica in replicas]
            if not servers:
                return
            self.misfits += _each(ray.get([server.capture_misfits.remote() for server in servers]))
        except AttributeError as error:
            self.misfits.append(f"the role rollout: not recorded, because its servers do not fit ({error})")
            return
        self._callback.add_rollout(servers)

    def _add_rollout_processes(self, loops: list[Any], scorers: list[Any]) -> None:
        """Add the processes that run trajectories, and those that score them."""
        if add_actors(self._callback, self._settings, _AGENT_LOOPS, loops, self.misfits):
            self.agent_loops = loops
        add_actors(self._callback, self._settings, _REWARDS, scorers, self.misfits)


def _replicas(trainer: Any) -> list[Any]:
    """Return a trainer's own replicas; the server on the first node of each acts for the other nodes."""
    if hasattr(trainer, "_rollout_server_managers"):
        managers = trainer._rollout_server_managers()
    else:  # V0 trainers, and verl 0.9.0
        named = ("llm_server_manager", "standalone_server_manager")
        managers = [getattr(trainer, name) for name in named if hasattr(trainer, name)]
    return [replica for manager in managers for replica in manager.get_replicas()]


def _each(replies: Sequence[Sequence[str] | None]) -> list[str]:
    """Return what several processes said that does not fit."""
    return [text for reply in replies for text in reply or ()]
