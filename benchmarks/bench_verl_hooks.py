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
from types import SimpleNamespace
from typing import Any

from bench_instructions import count, measured
from results import record, row

from verl_profiling import ProfilingCallback, stage
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.vllm_requests import watch_vllm
from verl_profiling.integrations import verl_trainer, verl_training_workers

CALLS = {
    "timer `step`": 1,
    "timer `gen`": 1,
    "another timer": 4,
    "method of the actor that is a stage": 4,
    "method that is a critic's stage": 4,
    "mini-batch": 2,
    "list of micro-batches": 4,
    "request": 16,
}
CODE = (
    "verl_profiling/integrations/verl_trainer.py",
    "verl_profiling/integrations/verl_training_workers.py",
    "verl_profiling/engines/vllm_requests.py",
    "verl_profiling/capture/stage.py",
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

    def generate(self, prompt: int) -> int:
        """Do nothing."""
        return prompt

    def prepare_micro_batches(self, data: int) -> tuple[list[int], list[int]]:
        """Do nothing."""
        return [], []


def with_timer(timer: Callable[[str], Any], name: str) -> Callable[[], None]:
    """Return a function that enters a timer."""

    def enter() -> None:
        with timer(name):
            pass

    return enter


def pairs() -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Yield what is hooked, plain and hooked, in the order of ``CALLS``."""
    timers = SimpleNamespace(marked_timer=marked_timer)
    verl_trainer.hook_timers(timers)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"enable": True, "save_path": folder, "schedule": {"steps": [10**9]}}
        profiler = verl_trainer.TrainerProfiler.__new__(verl_trainer.TrainerProfiler)
        profiler.__dict__.update(
            _trainer=SimpleNamespace(global_steps=7),
            _callback=ProfilingCallback(settings),
            _generating=False,
            _policy_version=0,
            _folders={},
        )
        verl_trainer._active = profiler
        for name in ("step", "gen", "adv"):
            yield with_timer(marked_timer, name), with_timer(timers.marked_timer, name)
    plain, hooked = Plain(), Plain()
    method = Plain.method
    for wrapped in (
        stage("update_actor")(method),
        verl_training_workers._critic_stage("values", method),
        verl_training_workers._counted_mini_batch(method),
    ):
        yield lambda: method(plain, 1), lambda wrapped=wrapped: wrapped(plain, 1)
    verl_training_workers.hook_fsdp_engine(hooked)
    yield lambda: plain.prepare_micro_batches(1), lambda: hooked.prepare_micro_batches(1)
    log = RequestLog()
    log.serve(0, enable=True)
    watch_vllm(hooked, log)
    yield lambda: plain.generate(1), lambda: hooked.generate(1)


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
