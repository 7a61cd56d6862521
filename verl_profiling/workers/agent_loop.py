"""The mixins for the CPU processes of a rollout: agent loops, and rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers.base import CaptureMixin

__all__ = ["AgentLoopCaptureMixin", "RewardCaptureMixin"]


class AgentLoopCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` for a process that runs trajectories: environments, tools, turns.

    It records :func:`verl_profiling.trajectory` and :func:`verl_profiling.span`, in e2e mode, whatever the
    tool of other roles is. ``roles.<role>.tool`` adds a tool, and ``roles.<role>.mode`` sets the mode.
    """

    capture_role: ClassVar[str] = "agent_loop"

    def init_capture(  # type: ignore[override]
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Set this worker up.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group; by default ``agent_loop``.
            rank: Which of the group's workers it is, from 0.
            world_size: Number of workers of the group.

        Raises:
            ConfigError: The settings are wrong.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        role = role or self.capture_role
        settings = ProfilingConfig.from_any(config).with_trajectories(role)
        super().init_capture(settings, role=role, rank=rank, world_size=world_size)


class RewardCaptureMixin(AgentLoopCaptureMixin):
    """The same for a process that scores responses on a CPU; its role is ``reward`` by default."""

    capture_role: ClassVar[str] = "reward"
