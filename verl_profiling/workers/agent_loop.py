"""The mixins for the CPU processes of a rollout: agent loops, and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers.base import CaptureMixin

__all__ = ["AgentLoopCaptureMixin", "RewardCaptureMixin"]


class AgentLoopCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` for a process that runs trajectories: environments, tools, turns.

    It records :func:`verl_profiling.trajectory` and :func:`verl_profiling.span`, in e2e mode, whatever the
    tool of other roles is. ``roles.<role>.tool`` adds a tool, and ``roles.<role>.mode`` sets the mode.
    """

    def init_capture(  # type: ignore[override]
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str = "agent_loop",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Set this worker up.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group.
            rank: Which of the group's workers it is, from 0.
            world_size: Number of workers of the group.

        Raises:
            ConfigError: The settings are wrong.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        settings = ProfilingConfig.from_any(config).with_trajectories(role)
        super().init_capture(settings, role=role, rank=rank, world_size=world_size)


class RewardCaptureMixin(AgentLoopCaptureMixin):
    """The same for a process that scores responses on a CPU."""

    def init_capture(  # type: ignore[override]
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str = "reward",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Set this worker up; see :meth:`AgentLoopCaptureMixin.init_capture`."""
        super().init_capture(config, role=role, rank=rank, world_size=world_size)
