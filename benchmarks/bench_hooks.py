"""What the hooks and stages cost: ratios against named peers, medians of interleaved rounds.

Run: ``python benchmarks/bench_hooks.py``. With verl 0.9.1 installed (see
``requirements/bench.txt``) its ``DistProfiler.annotate`` is measured in the same run.
Times are CPU times of the thread, so that other work on the machine counts less.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial

from results import record, row

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply
from verl_profiling.workers import CaptureMixin

ROUNDS = 21
CALLS = 10_000
RECORDED_CALLS = 2_000
METRICS = {"loss": 1.0}
STAGES = (
    "rollout",
    "reward",
    "old_log_prob",
    "ref_log_prob",
    "advantage",
    "update_actor",
    "update_weights",
)
METHOD = f"{ROUNDS} rounds, one after another in every round, {{calls:,}} calls each, CPU time."
ANNOTATE = "verl `DistProfiler.annotate`"
VERL_SETUP = (
    "as verl's workers hold it: tool torch, contents [cpu], one recording per step (discrete off), "
    "all ranks, no finish command, no RL-Insight"
)


class CountingWorker(CaptureMixin):
    """A worker that counts the calls it gets."""

    calls = 0

    def start_capture(self, request: CaptureStart) -> StartReply:
        self.calls += 1
        return super().start_capture(request)

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        self.calls += 1
        return super().stop_capture(capture_id, finish_s)


def ns_per_call(function: Callable[[], None], calls: int) -> float:
    """Return the CPU time of one call in nanoseconds, the empty loop's taken off."""
    loop = range(calls)
    begin = time.thread_time_ns()
    for _ in loop:
        pass
    empty = time.thread_time_ns() - begin
    begin = time.thread_time_ns()
    for _ in loop:
        function()
    return (time.thread_time_ns() - begin - empty) / calls


def in_turn(measured: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure in turn, several rounds, so that a slow spell of the machine hits all."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS + 1):
        for name, measure in measured.items():
            found[name].append(measure())
    return {name: values[1:] for name, values in found.items()}


def hooks_of_a_step(callback: ProfilingCallback) -> None:
    """Call the hooks that a loop calls in every step."""
    callback.on_step_begin(7)
    callback.on_rollout_begin()
    callback.on_rollout_end(METRICS)
    callback.on_step_end(METRICS)


def unprofiled_step() -> None:
    """All hooks of a step that is not profiled, and the calls that they make to workers."""
    worker = CountingWorker()
    with tempfile.TemporaryDirectory() as folder:
        config = {"enable": True, "save_path": folder, "schedule": {"steps": [10**9]}}
        worker.init_capture(config, role="actor")
        callback = ProfilingCallback(config)
        callback.add_workers("actor", [worker])
        callback.on_train_begin()

        def hooks() -> None:
            hooks_of_a_step(callback)

        def hooks_and_stages() -> None:
            hooks_of_a_step(callback)
            for name in STAGES:
                with callback.stage(name):
                    pass

        found = in_turn(
            {
                "hooks": lambda: ns_per_call(hooks, CALLS) / 1000,
                "stages": lambda: ns_per_call(hooks_and_stages, CALLS) / 1000,
            }
        )
        callback.on_train_end()
    record(
        "hooks",
        [
            row("the four hooks of an unprofiled step", found["hooks"], "us"),
            row(f"the hooks and {len(STAGES)} controller stages", found["stages"], "us"),
            row("calls to workers (counted)", [worker.calls], ""),
        ],
        method=METHOD.format(calls=CALLS),
        peers={},
    )


def null() -> None:
    """Enter what does nothing."""
    with contextlib.nullcontext():
        pass


def ours() -> None:
    """Enter a stage."""
    with stage("update_actor"):
        pass


@stage("update_actor")
def ours_decorated() -> None:
    """Be a stage."""


def stages() -> None:
    """``stage()`` idle and recording, against ``nullcontext`` and verl's ``annotate``."""
    verl = verl_worker()
    idle = {"null": null, "with": ours, "decorator": ours_decorated}
    if verl is not None:
        idle["verl"] = verl.annotated
    found = in_turn({name: partial(ns_per_call, f, CALLS) for name, f in idle.items()})
    nullcontext, decorator = "`with contextlib.nullcontext():`", '`@stage("update_actor")`'
    rows = [
        row(nullcontext, found["null"], "ns"),
        row(
            '`with stage("update_actor"):`',
            found["with"],
            "ns",
            against=nullcontext,
            of=found["null"],
        ),
        row(decorator, found["decorator"], "ns", against=nullcontext, of=found["null"]),
    ]
    if verl is not None:
        rows.append(
            row(
                f"{ANNOTATE}, enabled, step not profiled",
                found["verl"],
                "ns",
                against=decorator,
                of=found["decorator"],
            )
        )
    peers = {ANNOTATE: VERL_SETUP} if verl is not None else {}
    record("stage_idle", rows, method=METHOD.format(calls=CALLS), peers=peers)

    recorded = {
        "null": lambda: ns_per_call(null, RECORDED_CALLS),
        "spans": lambda: recorded_ns("spans", ours),
        "torch": lambda: recorded_ns("torch", ours),
        "decorator": lambda: recorded_ns("torch", ours_decorated),
    }
    if verl is not None:
        recorded["verl"] = verl.recorded_ns
    found = in_turn(recorded)
    decorator = f"{decorator}, tool `torch`"
    rows = [
        row(
            f'`with stage("update_actor"):`, tool `{tool}`',
            found[tool],
            "ns",
            against=nullcontext,
            of=found["null"],
        )
        for tool in ("spans", "torch")
    ]
    rows.append(row(decorator, found["decorator"], "ns", against=nullcontext, of=found["null"]))
    if verl is not None:
        rows.append(
            row(
                f"{ANNOTATE}, recording",
                found["verl"],
                "ns",
                against=decorator,
                of=found["decorator"],
            )
        )
    record("stage_recorded", rows, method=METHOD.format(calls=RECORDED_CALLS), peers=peers)


@contextlib.contextmanager
def recording(tool: str) -> Iterator[None]:
    """Keep a capture open."""
    worker = CaptureMixin()
    worker.init_capture({"enable": True, "tool": tool}, role="actor")
    with tempfile.TemporaryDirectory() as folder:
        worker.start_capture(CaptureStart(capture_id=folder, run_id="bench", step=1, folder=folder))
        yield
        worker.stop_capture(finish_s=30.0)


def recorded_ns(tool: str, function: Callable[[], None]) -> float:
    """Return nanoseconds per call in a capture of its own."""
    with recording(tool):
        return ns_per_call(function, RECORDED_CALLS)


class VerlWorker:
    """Holds verl's profiler the way verl's workers do."""

    def __init__(self, folder: str) -> None:
        from verl.utils.profiler.config import ProfilerConfig, TorchProfilerToolConfig
        from verl.utils.profiler.profile import DistProfiler

        tool = TorchProfilerToolConfig(contents=["cpu"], discrete=False)
        settings = ProfilerConfig(
            tool="torch", enable=True, all_ranks=True, save_path=folder, tool_config=tool
        )
        self.profiler = DistProfiler(rank=0, config=settings, tool_config=tool)

        @DistProfiler.annotate(role="update_actor")  # type: ignore[untyped-decorator]
        def update_actor(self: VerlWorker) -> None:
            pass

        self.annotated: Callable[[], None] = update_actor.__get__(self)

    def recorded_ns(self) -> float:
        """Return nanoseconds per call in a recording of its own."""
        self.profiler.start(role="actor", profile_step="1")
        took = ns_per_call(self.annotated, RECORDED_CALLS)
        self.profiler.stop(run_command=False)
        return took


def verl_worker() -> VerlWorker | None:
    """Return verl's side, or ``None`` where it is not installed."""
    try:
        return VerlWorker(tempfile.mkdtemp())
    except ImportError as error:
        print(f"verl is not measured: {error} (pip install -r requirements/bench.txt)")
        return None


if __name__ == "__main__":
    unprofiled_step()
    stages()
