"""What noting requests costs a rollout engine: the wrapper around ``generate``, idle and recording.

The generator behind it yields at once, so that the difference is the wrapper alone. Medians of
interleaved rounds in CPU time, and ratios to the same requests without a wrapper.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from results import record, row

from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.vllm_requests import watch_vllm

ROUNDS = 15
REQUESTS = 2000
OUTPUTS = 16


@dataclass
class Completion:
    """The part of vLLM's output that is looked at."""

    token_ids: list[int]
    index: int = 0


@dataclass
class Statistics:
    """The same of what it tells of a request's way."""

    num_preemptions: int = 0
    queued_ts: float = field(default_factory=time.monotonic)
    scheduled_ts: float = field(default_factory=time.monotonic)
    first_token_ts: float = field(default_factory=time.monotonic)
    last_token_ts: float = field(default_factory=time.monotonic)


@dataclass
class Output:
    """The same for a request."""

    finished: bool
    num_cached_tokens: int = 3
    metrics: Statistics = field(default_factory=Statistics)
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    outputs: list[Completion] = field(default_factory=lambda: [Completion([1])])


STREAM = [Output(False)] * (OUTPUTS - 1) + [Output(True)]


class Engine:
    """Yields what an engine would, and nothing else."""

    async def generate(self, prompt: str) -> AsyncIterator[Output]:
        """Yield outputs without waiting."""
        for output in STREAM:
            yield output


async def seconds_per_request(engine: Engine) -> float:
    """Serve requests one after another; return CPU seconds."""
    begin = time.process_time()
    for _ in range(REQUESTS):
        async for _ in engine.generate("prompt"):
            pass
    return (time.process_time() - begin) / REQUESTS


async def main() -> None:
    """Measure and print."""
    bare, idle, recording = Engine(), Engine(), Engine()
    idle_log, log = RequestLog(), RequestLog()
    idle_log.serve(0, enable=True)
    log.serve(0, enable=True)
    watch_vllm(idle, idle_log)
    watch_vllm(recording, log)
    found: dict[str, list[float]] = {"bare": [], "idle": [], "recording": []}
    for _ in range(ROUNDS):
        found["bare"].append(await seconds_per_request(bare))
        found["idle"].append(await seconds_per_request(idle))
        log.begin(None)
        found["recording"].append(await seconds_per_request(recording))
        log.end()
    us = {name: [1e6 * value for value in values] for name, values in found.items()}
    bare_label = "a request without a watcher"
    record(
        "engines",
        [
            row(bare_label, us["bare"], "us"),
            row("watched, nothing records", us["idle"], "us", against=bare_label, of=us["bare"]),
            row("watched and noted", us["recording"], "us", against=bare_label, of=us["bare"]),
        ],
        method=f"A generator that yields {OUTPUTS} outputs at once. {ROUNDS} rounds in turn, "
        f"{REQUESTS:,} "
        "requests each, CPU time.",
        peers={},
    )


if __name__ == "__main__":
    asyncio.run(main())
