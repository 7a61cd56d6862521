"""What the agent deals with: an environment that asks for countdowns, and two tools.
They take their time.
"""

import asyncio
import subprocess
import sys

from omegaconf import DictConfig

from verl_profiling.integrations.tiny_grpo import END


class Environment:
    """Asks for one countdown after the other."""

    def __init__(self, config: DictConfig, numbers: list[int]) -> None:
        self._config = config
        self._numbers = iter(numbers)

    async def start(self, cold: bool) -> int:
        """Start it and return the first number; a cold start takes long."""
        await asyncio.sleep(self._config.cold_start_s if cold else self._config.start_s)
        return next(self._numbers)

    async def step(self) -> int | None:
        """Return the next number, or ``None`` at the end."""
        await asyncio.sleep(self._config.step_s)
        return next(self._numbers, None)


class Tools:
    """What the agent may call."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config

    async def search(self, number: int) -> list[int]:
        """Look an answer up; other trajectories go on meanwhile."""
        await asyncio.sleep(self._config.search_s)
        return [*range(number - 1, -1, -1), END]

    async def sandbox(self, number: int, answer: list[int]) -> bool:
        """Return whether an answer is right, as a program says that runs in a process of its own.

        Here is the mistake to be found: `subprocess.run` waits, and it waits on the event loop. So
        all trajectories of this process wait, unless a thread does it.
        """
        if self._config.sandbox_blocks:
            return self._run(number, answer)
        return await asyncio.to_thread(self._run, number, answer)

    def _run(self, number: int, answer: list[int]) -> bool:
        program = (
            f"import time; time.sleep({self._config.sandbox_s}); "
            f"print([*range({number} - 1, -1, -1), {END}] == {answer})"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True
        )
        return done.stdout.strip() == "True"
