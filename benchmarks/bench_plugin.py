"""What the plugin costs a real engine of vLLM on a CPU while nothing is captured.

Two engines serve the same requests in turn: one without the plugin, and one that it records into a
run with a watch. The machine may be shared, so CPU time of the engine's processes is compared, and
not tokens per second. Two threads of the plugin work by the clock, so their share grows with the
load of the machine. The model is tiny, and nothing is detokenized: a larger share of the time than
of any engine in use is the plugin's. It runs in the environment of ``make test-vllm``.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from results import record, row

ROUNDS = 41
BURSTS = 5  # the cheapest of a round counts: other processes take caches, and only add to the time
REQUESTS, TOKENS = 16, 64
ABSENT, ON = "an engine without the plugin", "the plugin is on, nothing is captured"
CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_OF_A_PROCESS = 2  # Linux: the clock of all threads of the process whose id stands before it


def make_model(folder: Path) -> None:
    """Write a random Qwen2 with two layers."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).save_pretrained(
        folder
    )


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it has started."""
    seconds = time.process_time()
    for child in psutil.Process().children(recursive=True):
        seconds += time.clock_gettime((~child.pid << 3) | _OF_A_PROCESS)
    return seconds


def serve(connection: Connection, model: str, variables: dict[str, str]) -> None:
    """Serve a round for each message; answer with its CPU seconds per token."""
    os.environ.update(variables)
    asyncio.run(_serve(connection, model))


async def _serve(connection: Connection, model: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=REQUESTS,
            dtype="float32",
        )
    )
    round = "warm-up"
    while round:
        bursts = [await _burst(engine, f"{round} {number}") for number in range(BURSTS)]
        connection.send(min(bursts))
        round = await asyncio.to_thread(connection.recv)
    engine.shutdown()


async def _burst(engine: Any, name: str) -> float:
    """Serve some requests at a time; return CPU seconds per token."""
    begin_s = cpu_seconds()
    await asyncio.gather(*[_generate(engine, f"{name} {number}") for number in range(REQUESTS)])
    return (cpu_seconds() - begin_s) / (REQUESTS * TOKENS)


async def _generate(engine: Any, name: str) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    async for _ in engine.generate({"prompt_token_ids": [5, 6, 7, 8]}, sampling, name):
        pass


@contextmanager
def engine(model: str, **variables: str) -> Iterator[Connection]:
    """Start an engine in a process of its own; yield the connection to it."""
    connection, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve, args=(other, model, {**CPU, **variables}))
    process.start()
    connection.recv()
    yield connection
    connection.send("")
    process.join()


def main() -> None:
    """Measure and print."""
    us: dict[str, list[float]] = {ABSENT: [], ON: []}
    with tempfile.TemporaryDirectory() as folder:
        model, run = f"{folder}/model", f"{folder}/run"
        make_model(Path(model))
        with (
            engine(model, VLLM_PLUGINS="") as absent,
            engine(model, VERL_PROFILING_RUN=run) as plugged,
        ):
            turns = [(ABSENT, absent), (ON, plugged)]
            for number in range(ROUNDS):
                for what, connection in turns:
                    connection.send(f"round {number}")
                    us[what].append(1e6 * connection.recv())
                turns.reverse()
        if not Path(run, "watch.jsonl").exists():
            sys.exit("the engine was not recorded; install the package again")
    record(
        "plugin",
        [
            row(ABSENT, us[ABSENT], "us a token"),
            row(ON, us[ON], "us a token", against=ABSENT, of=us[ABSENT]),
        ],
        method=f"`AsyncLLM` with a Qwen2 of two layers. {ROUNDS} rounds in turn, the cheapest of "
        f"{BURSTS} bursts of {REQUESTS} requests with {TOKENS} tokens, CPU time of all processes "
        "of an engine.",
        peers={},
    )


if __name__ == "__main__":
    main()
