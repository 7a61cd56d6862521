"""Instructions that the verl plugin adds to a step that is not profiled: each hook's, times its calls.

Run: ``python benchmarks/bench_verl_hooks.py`` (needs valgrind, not verl: what is hooked here does nothing, so
that the difference between hooked and plain is the hook's own). The calls are those of one step of
``recipes/verl_grpo_cpu``: its timers as a whole run noted them (``verl_probe.py``), workers and requests as
its settings have them (8 prompts with 2 samples, 2 mini-batches, 4 samples in a micro-batch).
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from bench_instructions import count, measured
from results import record, row

from verl_profiling import ProfilingCallback
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.vllm import watch_vllm
from verl_profiling.integrations.verl import trainer, trajectories, workers
from verl_profiling.trajectories import trajectory
from verl_profiling.trajectories.spans import keep_trajectories

CALLS = {
    "timer `step`": 1,
    "timer `gen`": 1,
    "another timer": 4,
    "method of the actor that is a stage": 4,
    "method that is a critic's stage": 4,
    "mini-batch": 2,
    "list of micro-batches": 4,
    "request": 16,
    "trajectory": 16,
    "what came out of one": 16,
    "request of a trajectory": 16,
    "waiting for a server": 16,
    "id of a request": 16,
    "timer of a trajectory": 32,
    "tokenizing": 32,
    "putting a response": 16,
    "reward": 16,
    "call of the trainer to TransferQueue": 10,
}
CODE = (
    "verl_profiling/integrations/verl/trainer.py",
    "verl_profiling/integrations/verl/workers.py",
    "verl_profiling/integrations/verl/trajectories.py",
    "verl_profiling/integrations/hooks.py",
    "verl_profiling/engines/vllm.py",
    "verl_profiling/capture/stage.py",
    "verl_profiling/trajectories/spans.py",
)


@contextlib.contextmanager
def marked_timer(name: str) -> Iterator[None]:
    """Be a timer that takes no time."""
    yield


class Plain:
    """Has the methods that are hooked."""

    config = SimpleNamespace(model_type="language_model")

    def method(self, data: int) -> int:
        """Do nothing."""
        return data

    update_actor = compute_log_prob = infer_batch = train_mini_batch = train_batch = method

    def generate(self, prompt: int) -> int:
        """Do nothing."""
        return prompt

    def prepare_micro_batches(self, data: int) -> tuple[list[int], list[int]]:
        """Do nothing."""
        return [], []


PROMPT = {"agent_name": "own", "uid": "group", "session_id": 1}
INFO = {"step": 7, "sample_index": 1, "rollout_n": 0, "validate": False}
OUTPUT = SimpleNamespace(
    num_turns=2, prompt_ids=[1] * 32, response_ids=[1] * 32, extra_fields={}, reward_score=1.0
)
DATA = SimpleNamespace(non_tensor_batch={"uid": ["group"], "session_id": [1]})


def make_module() -> SimpleNamespace:
    """Return the classes and functions of agent loops, which do nothing."""

    async def nothing(*args: Any, **kwargs: Any) -> SimpleNamespace:
        return OUTPUT

    class LLMServerClient:
        generate = _acquire_server = nothing

        def _vllm_request_id(self, request_id: str) -> str:
            return request_id

    def queue_call(*args: Any, **kwargs: Any) -> None:
        pass

    return SimpleNamespace(
        __name__="plain",
        AgentLoopWorker=type(
            "AgentLoopWorker",
            (),
            {"_run_agent_loop": nothing, "_compute_score": nothing, "_postprocess": queue_call},
        ),
        AgentLoopBase=type("AgentLoopBase", (), {"ct_build_initial_tokens": nothing}),
        RewardLoopWorker=type("RewardLoopWorker", (), {"compute_score": nothing}),
        LLMServerClient=LLMServerClient,
        simple_timer=marked_timer,
        **dict.fromkeys(trainer._TRANSFER_QUEUE, queue_call),
        **dict.fromkeys(trainer._TRANSFER_QUEUE_OF_AGENT_LOOPS, nothing),
    )


def awaited(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """Return a function that awaits a coroutine which never waits."""

    def run() -> None:
        with contextlib.suppress(StopIteration):
            function(*args, **kwargs).send(None)

    return run


def calls_of_a_trajectory(module: SimpleNamespace) -> Iterator[Callable[[], Any]]:
    """Yield what is called for one, in the order of ``CALLS``."""
    worker, client = module.AgentLoopWorker(), module.LLMServerClient()
    yield awaited(worker._run_agent_loop, {}, INFO, **PROMPT)
    yield awaited(worker._compute_score, [OUTPUT], kwargs={})
    yield awaited(client.generate, "request")
    yield awaited(client._acquire_server, "request")
    yield lambda: client._vllm_request_id("request")
    yield with_timer(module.simple_timer, "generate_sequences")
    yield awaited(module.AgentLoopBase().ct_build_initial_tokens, [])
    yield awaited(module.async_kv_batch_put)
    yield awaited(module.RewardLoopWorker().compute_score, DATA)
    yield module.kv_list


def with_timer(timer: Callable[[str], Any], name: str) -> Callable[[], None]:
    """Return a function that enters a timer."""

    def enter() -> None:
        with timer(name):
            pass

    return enter


def pairs() -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Yield what is hooked, plain and hooked, in the order of ``CALLS``."""
    timers = SimpleNamespace(marked_timer=marked_timer)
    trainer.hook_timers(timers)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"enable": True, "save_path": folder, "schedule": {"steps": [10**9]}}
        profiler = trainer.TrainerProfiler.__new__(trainer.TrainerProfiler)
        profiler.__dict__.update(
            trainer=SimpleNamespace(global_steps=7),
            _callback=ProfilingCallback(settings),
            _generating=False,
            _policy_version=0,
        )
        with profiler.activated():
            for name in ("step", "gen", "adv"):
                yield with_timer(marked_timer, name), with_timer(timers.marked_timer, name)
    actor, worker = type("Actor", (Plain,), {}), type("Worker", (Plain,), {})
    workers.hook_stages(SimpleNamespace(ActorRolloutRefWorker=actor, TrainingWorker=worker))
    plain, hooked = Plain(), worker()
    for wrapped in (actor().update_actor, hooked.infer_batch, hooked.train_batch):
        yield lambda: plain.method(1), partial(wrapped, 1)
    workers.hook_fsdp_engine(hooked)
    yield lambda: plain.prepare_micro_batches(1), lambda: hooked.prepare_micro_batches(1)
    log = RequestLog()
    log.serve(0, enable=True)
    watch_vllm(hooked, log)
    yield lambda: plain.generate(1), lambda: hooked.generate(1)
    yield from zip(calls_of_a_trajectory(make_module()), in_trajectories(make_module()), strict=True)


def in_trajectories(module: SimpleNamespace) -> Iterator[Callable[[], Any]]:
    """Yield the same hooked, in a process that has been captured before."""
    keep_trajectories()
    for hook in (
        trajectories.hook_agent_loops,
        trajectories.hook_simple_timer,
        trajectories.hook_clients,
        trajectories.hook_reward_loops,
        trainer.hook_transfer_queue,
    ):
        hook(module)
    first, *others = calls_of_a_trajectory(module)
    yield first
    with trajectory(group="group"):
        yield from others


def main() -> int:
    """Record what each hook adds, and the sum of a step."""
    if shutil.which("valgrind") is None:
        print("SKIPPED: instructions are not counted, because valgrind is not installed")
        return 0
    found = [each.instructions for each in measured(__file__, 2 * len(CALLS))]
    own = [hooked - plain for plain, hooked in zip(found[::2], found[1::2], strict=True)]
    rows = [
        row(f"{name}, {calls} in a step", [each], "")
        for (name, calls), each in zip(CALLS.items(), own, strict=True)
    ]
    total = sum(calls * each for calls, each in zip(CALLS.values(), own, strict=True))
    rows.append(row("all of a step", [total], ""))
    method = "Instructions that the hook adds to one call, under callgrind."
    record("verl_instructions", rows, method=method, code=CODE, peers={})
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["count"]:
        for plain, hooked in pairs():
            count(plain)
            count(hooked)
    else:
        sys.exit(main())
