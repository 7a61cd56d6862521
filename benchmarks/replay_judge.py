"""Holds replays of a rollout against the loop that made it, and against the loop with a setting.

Run: ``make replay-judge``. A tiny GRPO loop sends the requests of a step to an engine on the CPU,
and then trains; its steps are captured. The first row sends each captured rollout again, without a
change, ten times in all. The others start the engine with a setting: they send the captured
rollouts, which predicts the step, and then run the loop with this engine. An engine serves both the
replays and the loop. ``replay_judge.py sglang`` holds SGLang's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_profiling import AsyncProfilingCallback
from verl_profiling.analysis import CapturedStep, open_step
from verl_profiling.commands.replay import load_of_step, seconds_of, with_rollout
from verl_profiling.integrations.replay import EngineServer, Server, replay

VOCABULARY, LONGEST = 512, 512
PROMPTS, GROUP = 12, 4
PROMPT_TOKENS, RESPONSE_TOKENS = (96, 224), (12, 48)
CAPTURED = 5  # steps of the loop, after one that warms up
REPLAYS = 10  # of the captured steps in turn, without a change
TRAINING_CHUNKS = 60

BASE: dict[str, dict[str, Any]] = {
    "vllm": {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "enable_prefix_caching": False,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 512,
        "block_size": 32,
    },
    "sglang": {
        "skip_tokenizer_init": True,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "max_total_tokens": 32768,
        "mem_fraction_static": 0.3,
        "log_level": "error",
        "max_running_requests": 12,
        "chunked_prefill_size": 512,
    },
}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "vllm": [
        {"max_num_seqs": 3},
        {"max_num_seqs": 6},
        {"max_num_seqs": 48},
        {"enable_prefix_caching": True},
        {"enable_chunked_prefill": False},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 4096},
        {"replicas": 2},
    ],
    "sglang": [
        {"max_running_requests": 3},
        {"max_running_requests": 6},
        {"max_running_requests": 48},
        {"disable_radix_cache": False},
        {"chunked_prefill_size": 64},
        {"chunked_prefill_size": 4096},
        {"schedule_conservativeness": 2.0},
        {"replicas": 2},
    ],
}


def model_of(folder: Path) -> None:
    """Write a Qwen2 with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


class Loop:
    """A tiny GRPO loop: groups of responses to prompts, and a policy that trains in this process.

    Each step has prompts and lengths of its own; equal steps of two loops have the same.
    """

    def __init__(self) -> None:
        self.policy = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 64), torch.nn.Linear(64, VOCABULARY)
        )

    async def roll_out(self, step: int, servers: Sequence[Server]) -> None:
        """Send all requests at once; replicas take turns."""
        draw, requests = random.Random(step), list[Any]()
        for prompt in range(PROMPTS):
            tokens = draw.choices(range(10, VOCABULARY), k=draw.randint(*PROMPT_TOKENS))
            for sample in range(GROUP):
                name = f"{step}.{prompt}.{sample}"
                server = servers[len(requests) % len(servers)]
                requests.append(server.generate(name, tokens, draw.randint(*RESPONSE_TOKENS)))
        await asyncio.gather(*requests)

    def train(self) -> None:
        """Do the forward and backward pass of the same number of tokens in every step."""
        tokens = torch.arange(VOCABULARY)
        for _ in range(TRAINING_CHUNKS):
            logits = self.policy(tokens)
            torch.nn.functional.cross_entropy(logits, tokens).backward()

    async def run(
        self, servers: Sequence[Server], settings: dict[str, Any], steps: int
    ) -> list[CapturedStep]:
        """Run the loop; return its captured steps."""
        folders = []
        async with AsyncProfilingCallback(settings) as callback:
            callback.add_rollout(list(servers))
            for step in range(1, steps + 2):
                await callback.on_step_begin(step)
                await callback.on_rollout_begin()
                await self.roll_out(step, servers)
                await callback.on_rollout_end()
                with callback.stage("update_actor"):
                    self.train()
                with callback.stage("update_weights"):
                    for server in servers:
                        await server.reset()
                await callback.on_step_end()
                if callback.last_folder is not None and step > 1:
                    folders.append(callback.last_folder)
        return [open_step(folder) for folder in folders]


class Judge:
    """An engine on the CPU, the loop, and the rows.

    Args:
        engine: ``vllm`` or ``sglang``.
        folder: Folder for the model and all runs.
    """

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.loop = Loop()
        self.steps: list[CapturedStep] = []
        model_of(folder / "model")

    def settings(self, name: str) -> dict[str, Any]:
        """Return the settings of a run."""
        return {
            "enable": True,
            "strict": True,
            "tool": "spans",
            "save_path": str(self.folder / name),
            "rollout": {"prompt_hashes": True},
        }

    def servers(self, change: dict[str, Any]) -> list[Server]:
        """Start the engine with a change; replicas have a core each."""
        replicas = change.get("replicas", 1)
        options = BASE[self.engine] | {key: change[key] for key in change if key != "replicas"}
        options["model" if self.engine == "vllm" else "model_path"] = str(self.folder / "model")
        if change == {"enable_chunked_prefill": False}:
            options["max_num_batched_tokens"] = LONGEST  # a whole prompt has to fit
        servers: list[Server] = []
        for replica in range(replicas):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(replica % (os.cpu_count() or 1))
            servers.append(EngineServer(self.engine, self.settings("run"), replica, options))
        return servers

    async def replayed_s(
        self, servers: Sequence[Server], name: str, times: int
    ) -> list[tuple[CapturedStep, float]]:
        """Send the captured rollouts in turn; return each with how much longer it took (s)."""
        more = []
        for number in range(times):
            step = self.steps[number % len(self.steps)]
            load = load_of_step(step)
            settings = self.settings(f"{name}/replay{number}")
            (folder,) = await replay(load, servers, settings, step=1)
            took_s = seconds_of(load_of_step(open_step(folder)))
            more.append((step, took_s - seconds_of(load)))
        return more

    async def unchanged(self, servers: Sequence[Server]) -> None:
        """Capture the loop, and print how far replays without a change are from it."""
        self.steps = await self.loop.run(servers, self.settings("loop"), CAPTURED)
        more = await self.replayed_s(servers, "none", REPLAYS)
        errors = [late_s / seconds_of(load_of_step(step)) for step, late_s in more]
        engine_s = statistics.median(seconds_of(load_of_step(step)) for step in self.steps)
        middle = statistics.median(errors)
        print(
            f"| none | {engine_s:.3f} s in the engine |  |  | {middle:+.1%} "
            f"({min(errors):+.1%} to {max(errors):+.1%}) | |",
            flush=True,
        )

    async def changed(
        self, servers: Sequence[Server], change: dict[str, Any]
    ) -> tuple[float, bool | None]:
        """Print the row of a change; return its error, and whether the direction is right."""
        name = ", ".join(f"{key}={value}" for key, value in change.items())
        await self.loop.run(servers, self.settings(f"{name}/warm"), 0)
        more = await self.replayed_s(servers, name, CAPTURED)
        after = await self.loop.run(servers, self.settings(f"{name}/loop"), CAPTURED)
        predicted_s = statistics.median(
            with_rollout(step, late_s).predicted_us / 1e6 for step, late_s in more
        )
        before_s = sorted(step.what_if().span_us / 1e6 for step in self.steps)
        after_s = sorted(step.what_if().span_us / 1e6 for step in after)
        recorded, truth = statistics.median(before_s), statistics.median(after_s)
        noise = max(before_s[-1] - before_s[0], after_s[-1] - after_s[0])
        is_right = None
        if abs(truth - recorded) > noise:
            is_right = (truth > recorded) == (predicted_s > recorded)
        error = predicted_s / truth - 1
        direction = {None: "in the noise", True: "right", False: "**wrong**"}[is_right]
        print(
            f"| `{name}` | {recorded:.3f} s | {predicted_s:.3f} s | {truth:.3f} s | {error:+.1%} "
            f"| {direction} |",
            flush=True,
        )
        return abs(error), is_right

    def rows(self, changes: Sequence[dict[str, Any]]) -> Iterator[tuple[float, bool | None]]:
        """Print a row for each change, the first of which is none; yield the results."""
        for change in changes:
            servers: list[Server] = []
            try:
                servers = self.servers(change)
                if change:
                    yield asyncio.run(self.changed(servers, change))
                else:
                    asyncio.run(self.unchanged(servers))
            except Exception as error:
                if not change:
                    raise
                print(f"| `{change}` | failed: {error!r} | | | | |", flush=True)
            finally:
                for server in servers:
                    server.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("engine", choices=BASE)
    parser.add_argument("--changes", type=int, default=8, help="only the first ones")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    torch.set_num_threads(1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="replay-judge-") as folder:
        judge = Judge(given.engine, Path(folder))
        print("| setting | step | predicted | brought | error | direction |")
        print("|---|---|---|---|---|---|", flush=True)
        rows = list(judge.rows([{}, *CHANGES[given.engine][: given.changes]]))
    right = [row[1] for row in rows if row[1] is not None]
    if rows:
        middle = statistics.median(row[0] for row in rows)
        print(
            f"\nMedian error of the step {middle:.1%}; direction right in {sum(right)} of "
            f"{len(right)} beyond the noise."
        )
    print(f"{time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
