"""Holds the knee that the report finds in one capture against replays with other limits.

Run: ``make knee-judge``. A vLLM engine on the CPU serves 96 drawn requests, at most 32 at once.
The capture of that says from how many on twice as many make less than a quarter more tokens per
second. Requests of the same load are then sent with at most 1, 2, 4, ... 16 at once, and their
speed counts from the first one to the begin of the last one: until then, as many run as may. Cases
differ in the model and in the lengths. A row takes half a minute on two free cores, most of it for
the start of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from math import log2
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from verl_profiling.analysis import open_step
from verl_profiling.commands.replay import load_of_step
from verl_profiling.integrations.replay import EngineServer, replay
from verl_profiling.manifest import Request
from verl_profiling.steps.load import Load, LoadRequest

LIMITS = (32, 16, 8, 4, 2, 1)
GAIN = 0.25  # as in verl_profiling/predict/engine_fit.py
REQUESTS, LEAST_REQUESTS = 96, 8  # of a limit three for each slot, or the least
VOCABULARY = 256
# hidden size, layers, tokens of a prompt, tokens of a response (from, to)
CASES = (
    (64, 2, 32, (20, 120)),
    (256, 4, 32, (20, 80)),
    (512, 4, 32, (20, 60)),
    (768, 8, 32, (10, 40)),
    (256, 8, 256, (10, 60)),
    (1024, 4, 32, (10, 40)),
    (128, 4, 128, (40, 120)),
    (512, 8, 32, (10, 50)),
    (384, 6, 64, (20, 60)),
    (768, 4, 16, (20, 60)),
)


class LimitedServer(EngineServer):
    """A vLLM engine to which a limited number of requests is sent at once."""

    limit = asyncio.Semaphore(LIMITS[0])

    async def generate(self, id: str, prompt: list[int], tokens: int) -> None:
        """Serve one request when there is room."""
        async with self.limit:
            await super().generate(id, prompt, tokens)


def model_of(folder: Path, hidden: int, layers: int) -> None:
    """Write a Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(hidden // 64, 1),
        num_key_value_heads=max(hidden // 64, 1),
        max_position_embeddings=1024,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def drawn_load(prompt: int, lengths: tuple[int, int]) -> Load:
    """Return requests with drawn lengths of their responses."""
    draw = random.Random(7)
    rows = []
    for number in range(REQUESTS):
        request = Request(
            replica=0,
            id=str(number),
            begin_ns=number,
            end_ns=number + 1,
            prompt_tokens=prompt,
            response_tokens=draw.randint(*lengths),
        )
        rows.append(LoadRequest(request=request, session=str(number)))
    return Load(requests=rows, left_out={}, problems=[])


async def rates(load: Load, server: LimitedServer, settings: dict[str, Any]) -> dict[int, Path]:
    """Send the load with each limit; return the captures."""
    captures = {}
    for limit in LIMITS:
        LimitedServer.limit = asyncio.Semaphore(limit)
        own = {**settings, "save_path": f"{settings['save_path']}/{limit}"}
        count = max(LEAST_REQUESTS, 3 * limit)
        part = replace(load, requests=load.requests[:count])
        (captures[limit],) = await replay(part, [server], own, step=limit)
        print(f"{limit} at once: {rate_in(captures[limit]):.0f} tokens/s", file=sys.stderr)
    return captures


def rate_in(capture: Path) -> float:
    """Return the tokens per second of a replay, as long as a request was waiting.

    A request's tokens count evenly from its begin to its end.
    """
    requests = [row.request for row in load_of_step(open_step(capture)).requests]
    begin_ns = min(one.begin_ns for one in requests)
    until_ns = max(one.scheduled_ns or one.begin_ns for one in requests)
    tokens = 0.0
    for one in requests:
        since_ns = one.scheduled_ns or one.begin_ns
        inside_ns = min(one.end_ns, until_ns) - since_ns
        tokens += one.response_tokens * max(inside_ns, 0) / (one.end_ns - since_ns)
    return tokens / (until_ns - begin_ns) * 1e9


def knee_in(made: dict[int, float]) -> int:
    """Return the knee of measured tokens per second, by the limit."""
    for limit in sorted(made):
        if 2 * limit in made and made[2 * limit] / made[limit] < 1 + GAIN:
            return limit
    return LIMITS[0]


def judged(case: tuple[int, int, int, tuple[int, int]]) -> bool:
    """Print the row of a case; return whether its knee is within one doubling."""
    hidden, layers, prompt, lengths = case
    with tempfile.TemporaryDirectory() as name:
        model_of(Path(name, "model"), hidden, layers)
        settings = {"enable": True, "strict": True, "tool": "spans", "save_path": f"{name}/run"}
        options = {
            "model": f"{name}/model",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "enable_prefix_caching": False,
            "max_num_seqs": LIMITS[0],
        }
        server = LimitedServer("vllm", settings, 0, options)
        try:
            captures = asyncio.run(rates(drawn_load(prompt, lengths), server, settings))
        finally:
            server.close()
        found = open_step(captures[LIMITS[0]]).report().knee
        made = {limit: rate_in(folder) for limit, folder in captures.items()}
    truth = knee_in(made)
    knee = None
    if found is not None:
        knee = found.requests or LIMITS[0]
    is_near = knee is not None and abs(log2(knee / truth)) <= 1
    speeds = ", ".join(f"{limit}: {made[limit]:.0f}" for limit in sorted(made))
    size = f"{hidden} x {layers}, {prompt} + {lengths[0]} to {lengths[1]}"
    print(f"| {size} | {speeds} | {truth} | {knee or 'unknown'} | {is_near} |", flush=True)
    print(found, file=sys.stderr, flush=True)
    return is_near


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=len(CASES))
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    print("| model and tokens | tokens/s by limit | knee | in the report | within a doubling |")
    print("|---|---|---|---|---|")
    near = [judged(case) for case in CASES[: arguments.cases]]
    print(f"{sum(near)} of {len(near)} within one doubling")


if __name__ == "__main__":
    main()
