"""What the hooks and stages cost: ratios against named peers, medians of interleaved rounds.

Run: ``python benchmarks/bench_hooks.py``. With verl 0.9.1 installed (see
``requirements/bench.txt``) its ``DistProfiler.annotate`` is measured in the same run.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply
from verl_profiling.workers import CaptureMixin

ROUNDS = 9
CALLS = 20_000
STAGES = ("rollout", "reward", "old_log_prob", "ref_log_prob", "advantage", "update_actor", "update_weights")


class CountingWorker(CaptureMixin):
    """A worker that counts the calls it gets."""

    calls = 0

    def start_capture(self, request: CaptureRequest) -> StartReply:
        self.calls += 1
        return super().start_capture(request)

    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        self.calls += 1
        return super().stop_capture(capture_id, finish_s)


def ns_per_call(function: Callable[[], None], calls: int = CALLS) -> float:
    """Return the time of one call in nanoseconds, the empty loop's taken off."""
    loop = range(calls)
    begin = time.perf_counter_ns()
    for _ in loop:
        pass
    empty = time.perf_counter_ns() - begin
    begin = time.perf_counter_ns()
    for _ in loop:
        function()
    return (time.perf_counter_ns() - begin - empty) / calls


def medians(functions: dict[str, Callable[[], None]], calls: int = CALLS) -> dict[str, float]:
    """Measure functions in turn, several rounds, so that a slow spell of the machine hits all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            times[name].append(ns_per_call(function, calls))
    return {name: statistics.median(values) for name, values in times.items()}


def unprofiled_step() -> None:
    """All hooks of a step that is not profiled, and the calls that they make to workers."""
    worker = CountingWorker()
    with tempfile.TemporaryDirectory() as folder:
        config = {"enable": True, "save_path": folder, "schedule": {"steps": [10**9]}}
        worker.init_capture(config, role="actor")
        callback = ProfilingCallback(config)
        callback.add_workers("actor", [worker])
        callback.on_train_begin()
        metrics = {"loss": 1.0}

        def hooks() -> None:
            callback.on_step_begin(7)
            callback.on_rollout_begin()
            callback.on_rollout_end(metrics)
            callback.on_step_end(metrics)

        def hooks_and_stages() -> None:
            hooks()
            for name in STAGES:
                with callback.stage(name):
                    pass

        found = medians({"hooks": hooks, "hooks and stages": hooks_and_stages})
        callback.on_train_end()
    print("unprofiled step")
    _row("the four hooks", f"{found['hooks'] / 1000:.2f} us", "goal: under 5")
    _row(
        f"with {len(STAGES)} controller stages", f"{found['hooks and stages'] / 1000:.2f} us", "goal: under 5"
    )
    _row("calls to workers", f"{worker.calls}", "goal: 0")


def stages() -> None:
    """``stage()`` idle and recording, against ``nullcontext`` and verl's ``annotate``."""

    def null() -> None:
        with contextlib.nullcontext():
            pass

    def ours() -> None:
        with stage("update_actor"):
            pass

    @stage("update_actor")
    def ours_decorated() -> None:
        pass

    peers: dict[str, Callable[[], None]] = {"nullcontext": null, "stage": ours, "decorator": ours_decorated}
    verl = _verl_worker()
    if verl is not None:
        peers["verl"] = verl.annotated
    idle = medians(peers)
    print("stage, nothing records (verl: enabled, step not profiled)")
    _row("with contextlib.nullcontext()", f"{idle['nullcontext']:.0f} ns")
    ratio = idle["stage"] / idle["nullcontext"]
    _row("with stage(...)", f"{idle['stage']:.0f} ns", f"ratio {ratio:.2f}, goal: at most 1.0")
    _row("@stage(...)", f"{idle['decorator']:.0f} ns")
    if verl is not None:
        ratio = idle["verl"] / idle["decorator"]
        _row("verl DistProfiler.annotate", f"{idle['verl']:.0f} ns", f"{ratio:.1f}x ours, goal: 8x")

    calls = 2_000
    print("stage, recording")
    _row("with stage(...), tool spans", f"{_recording('spans', ours, calls):.0f} ns", "goal: under 3000")
    _row("with stage(...), tool torch", f"{_recording('torch', ours, calls):.0f} ns", "goal: under 3000")
    decorated = _recording("torch", ours_decorated, calls)
    _row("@stage(...), tool torch", f"{decorated:.0f} ns")
    if verl is not None:
        theirs = verl.recording(calls)
        _row("verl DistProfiler.annotate", f"{theirs:.0f} ns", f"{theirs / decorated:.1f}x ours, goal: 5x")


def _row(label: str, value: str, note: str = "") -> None:
    print(f"  {label:32}{value:>10}   {note}")


def _recording(tool: str, function: Callable[[], None], calls: int) -> float:
    worker = CaptureMixin()
    worker.init_capture({"enable": True, "tool": tool}, role="actor")
    times = []
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            request = CaptureRequest(capture_id=str(number), run_id="bench", step=1, folder=folder)
            worker.start_capture(request)
            times.append(ns_per_call(function, calls))
            worker.stop_capture(finish_s=30.0)
    return statistics.median(times)


class _VerlWorker:
    """Holds verl's profiler the way verl's workers do."""

    def __init__(self, folder: str) -> None:
        from verl.utils.profiler.config import ProfilerConfig, TorchProfilerToolConfig
        from verl.utils.profiler.profile import DistProfiler

        tool = TorchProfilerToolConfig(contents=["cpu"], discrete=False)
        settings = ProfilerConfig(
            tool="torch", enable=True, all_ranks=True, save_path=folder, tool_config=tool
        )
        self.profiler = DistProfiler(rank=0, config=settings, tool_config=tool)

        @DistProfiler.annotate(role="update_actor")
        def update_actor(self: _VerlWorker) -> None:
            pass

        self.annotated: Callable[[], None] = update_actor.__get__(self)

    def recording(self, calls: int) -> float:
        times = []
        for number in range(ROUNDS):
            self.profiler.start(role="actor", profile_step=str(number))
            times.append(ns_per_call(self.annotated, calls))
            self.profiler.stop(run_command=False)
        return statistics.median(times)


def _verl_worker() -> _VerlWorker | None:
    try:
        return _VerlWorker(tempfile.mkdtemp())
    except ImportError as error:
        print(f"verl is not measured: {error} (pip install -r requirements/bench.txt)")
        return None


if __name__ == "__main__":
    unprofiled_step()
    stages()
