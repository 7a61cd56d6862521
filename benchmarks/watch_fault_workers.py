"""The processes of the loops in ``watch_faults.py``: real mixins, and work that can be made slower."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from verl_profiling import span, stage, trajectory
from verl_profiling.capture.session import process_session
from verl_profiling.workers import AgentLoopCaptureMixin, CaptureMixin, RequestLog, RolloutCaptureMixin

__all__ = ["USUAL_MS", "AgentLoop", "Rater", "Server", "Trainer", "Works"]

USUAL_MS = {"rollout": 50, "reward": 10, "old_log_prob": 20, "update_actor": 50, "update_weights": 10}
SPREAD = 0.05
"""Standard deviation of the logarithm of every time."""


class Works:
    """Does nothing for as long as its stages take, and can be made slower in what it does."""

    def set_up(self, config: dict[str, Any], number: int, of: int, seed: int) -> None:
        """Begin a run, as if in a new process."""
        process_session().leave()
        process_session().reset()
        self.random = random.Random(seed)
        self.factors: dict[str, float] = {}
        self.more_mb = 0.0
        self.held: list[bytes] = []
        self.prepare(config, number, of)

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""

    def slow(self, what: str, factor: float) -> None:
        """Be slower from now on, in a stage or a tool."""
        self.factors[what] = factor

    def grow(self, more_mb: float) -> None:
        """Hold so much more memory after every step from now on."""
        self.more_mb = more_mb

    def seconds(self, what: str, usual_ms: float) -> float:
        """Return how long something takes this time."""
        return usual_ms / 1e3 * self.random.lognormvariate(0, SPREAD) * self.factors.get(what, 1.0)


class Trainer(Works, CaptureMixin):
    """A training rank."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self._capture_roles = {}
        self.init_capture(config, role="actor", rank=number, world_size=of)

    def work(self, name: str) -> None:
        """Run one stage."""
        with stage(name):
            time.sleep(self.seconds(name, USUAL_MS[name]))
            if self.more_mb and name == "update_actor":
                self.held.append(b"\1" * int(self.more_mb * 1e6))


class Rater(Works, CaptureMixin):
    """The one process that rates responses."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self._capture_roles = {}
        self.init_capture(config, role="reward", rank=number, world_size=of)

    @stage("reward")
    def rate(self) -> None:
        """Rate a batch."""
        time.sleep(self.seconds("reward", USUAL_MS["reward"]))


class Server(Works, RolloutCaptureMixin):
    """A rollout engine."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self.init_capture(config, replica=number, requests=RequestLog())

    @stage("rollout")
    async def generate(self, usual_ms: float) -> None:
        """Answer a batch, or a request."""
        await asyncio.sleep(self.seconds("rollout", usual_ms))


class AgentLoop(Works, AgentLoopCaptureMixin):
    """Runs trajectories: two turns each, with a tool in between."""

    def prepare(self, config: dict[str, Any], number: int, of: int) -> None:
        """Set the capture up."""
        self._capture_roles = {}
        self.init_capture(config, rank=number, world_size=of)

    async def run(self, servers: list[Any], trajectories: int) -> None:
        """Run some at once; each has its own server."""
        with stage("rollout"):
            await asyncio.gather(
                *(self._trajectory(at, servers[at % len(servers)]) for at in range(trajectories))
            )

    async def _trajectory(self, sample: int, server: Any) -> None:
        async with trajectory(group="prompt", sample=sample):
            await server.generate.remote(20)
            async with span("tool:search"):
                if "tool" in self.factors:
                    time.sleep(self.seconds("tool", 5))  # blocks the loop, and every trajectory of it
                else:
                    await asyncio.sleep(self.seconds("tool", 5))
            await server.generate.remote(20)
