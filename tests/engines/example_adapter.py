"""An engine and a tool of your own: the engine's ranks record themselves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_profiling import ProfilingConfig, ToolUnavailableError
from verl_profiling.engines import ENGINES, EngineAdapter
from verl_profiling.identity import WorkerIdentity
from verl_profiling.tools import Destination, Recording, Tool
from verl_profiling.workers import RequestLog, RolloutCaptureMixin


class CountingEngine:
    """Makes tokens; each rank counts the iterations while it records, and writes the count."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._folder: Path | None = None
        self._iterations = 0

    def start_counting(self, folder: Path) -> None:
        """Begin to count."""
        self._folder, self._iterations = folder, 0

    def stop_counting(self, every: int) -> None:
        """Write what each rank counted."""
        if self._folder is not None:
            for rank in range(self.ranks):
                (self._folder / f"rank{rank}.txt").write_text(f"{self._iterations // every}\n")
        self._folder = None

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return new tokens for each prompt."""
        self._iterations += max_tokens
        return [[0] * max_tokens for _ in prompts]


@dataclass(frozen=True, kw_only=True)
class CounterOptions:
    """Options of the tool.

    Attributes:
        every: Count each n-th iteration.
    """

    every: int = 1


class CounterTool(Tool):
    """Writes ``rollout0_rank0.count.txt``; records engines alone."""

    name = "counter"
    suffix = ".count.txt"
    options_class = CounterOptions
    engine_profiler = "counter"  # an engine that has it lists it in its adapter

    def start(self, destination: Destination) -> Recording:
        """Refuse to record this process."""
        raise ToolUnavailableError("tool 'counter' records engines; set roles.rollout.tool alone")


class CountingAdapter(EngineAdapter):
    """All that is known of the engine."""

    name = "Counting"
    profilers = {"counter": {"every": (2, 1)}}  # it counts each, or each second one

    def __init__(
        self, engine: Any, config: ProfilingConfig, identity: WorkerIdentity, tool: Tool
    ) -> None:
        super().__init__(engine, config, identity, tool)
        self._engine = engine
        self.ranks = engine.ranks
        self.device = "cpu"

    @classmethod
    def accepts(cls, engine: Any) -> bool:
        return isinstance(engine, CountingEngine)

    @classmethod
    def watch(cls, engine: Any, log: RequestLog, identity: WorkerIdentity) -> None:
        def logged(generate: Callable[..., Any], prompts: list[list[int]], tokens: int) -> Any:
            with log.open() as batch:
                responses = generate(prompts, tokens)
                for prompt, response in zip(prompts, responses, strict=True):
                    batch.close(len(prompt), len(response))
            return responses

        log.watch_calls(engine, logged)

    async def start(self) -> None:
        self._engine.start_counting(self.spool)

    async def stop(self) -> None:
        self._engine.stop_counting(self.tool.options.every)

    def identify(self, path: Path) -> int | None:
        match = re.fullmatch(r"rank(\d+)\.txt", path.name)
        return int(match[1]) if match else None


ENGINES["counting"] = f"{__name__}:CountingAdapter"  # the line of registration


class CountingServer(RolloutCaptureMixin):
    """A rollout server with that engine; the settings have ``tool: "my_project:CounterTool"``."""

    def __init__(self, profiling: Any, replica: int, ranks: int) -> None:
        self.engine = CountingEngine(ranks)
        self.init_capture(profiling, replica=replica)
