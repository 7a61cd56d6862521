"""What recording trajectories costs: a span, a rollout of 10,000 trajectories, an idle loop, a
whole run.

Run: ``python benchmarks/bench_trajectories.py [spans] [scale] [lag] [run]`` (all of them by
default). The peers of a span are OpenTelemetry's tracer and verl's ``rollout_trace_op``
(``requirements/bench.txt``). Times of spans are CPU times of the thread that calls; what a peer
does on threads of its own is not counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from bench_hooks import CALLS, RECORDED_CALLS, ROUNDS, in_turn, ns_per_call, null
from bench_report import measure
from results import ROOT, record, row

from verl_profiling import ProfilingCallback, span, trajectory
from verl_profiling.workers import AgentLoopCaptureMixin

NULLCONTEXT = "`with contextlib.nullcontext():`"
PLAIN = "a coroutine function that does nothing"
SPAN = '`with span("tool:search"):`'
SPAN_IN_IT, ASYNC_SPAN = f"{SPAN} in it", '`async with span("tool:search"):` in it'
OPENTELEMETRY = "OpenTelemetry `start_as_current_span`"
TRACE_OP = "verl `rollout_trace_op` on it"
PEERS = {
    OPENTELEMETRY: "without attributes; idle: no SDK is set up, so that its tracer does "
    "nothing; recording: "
    "the SDK's `BatchSpanProcessor`, which exports on a thread of its own, to an exporter "
    "that keeps nothing",
    TRACE_OP: "on a coroutine method with one short argument; idle: no backend; recording: the "
    "backend mlflow as verl sets it up (SQLite, logged asynchronously), inside "
    "`rollout_trace_attr`",
}
TRACED_CALLS = 200
TRAJECTORIES, SPANS, AT_ONCE = 10_000, 20, 256
LAG_S = 10.0
STEPS = 40


@contextmanager
def captured(folder: str) -> Iterator[None]:
    """Keep a capture of an agent loop open."""
    worker = AgentLoopCaptureMixin()
    config = {"enable": True, "save_path": folder}
    worker.init_capture(config, role="agent_loop")
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("agent_loop", [worker])
        profiling.on_step_begin(1)
        yield
        profiling.on_step_end()


def ours() -> None:
    """Enter a span."""
    with span("tool:search"):
        pass


async def ours_in_a_task() -> None:
    """Enter a span."""
    with span("tool:search"):
        pass


async def ours_async() -> None:
    """Enter a span with ``async with``."""
    async with span("tool:search"):
        pass


async def plain() -> None:
    """Do nothing."""


def ns_per_await(function: Callable[[], Awaitable[None]], calls: int) -> float:
    """Return the CPU time of one awaited call in nanoseconds, on an event loop of its own."""

    async def run() -> float:
        begin = time.thread_time_ns()
        for _ in range(calls):
            await function()
        return (time.thread_time_ns() - begin) / calls

    return asyncio.run(run())


def spans() -> None:
    """Record what a span costs, idle and recording, against its peers."""
    telemetry, traced = OpenTelemetry(), TraceOp()
    found = in_turn(
        {
            "null": lambda: ns_per_call(null, CALLS),
            "span": lambda: ns_per_call(ours, CALLS),
            "telemetry": lambda: ns_per_call(telemetry.idle, CALLS),
            "plain": lambda: ns_per_await(plain, CALLS),
            "with": lambda: ns_per_await(ours_in_a_task, CALLS),
            "async": lambda: ns_per_await(ours_async, CALLS),
            "traced": lambda: ns_per_await(traced.search, CALLS),
        }
    )
    record_spans("span_idle", found, f"{CALLS:,} calls each")
    with tempfile.TemporaryDirectory() as folder:
        traced.record(folder)
        found = in_turn(
            {
                "null": lambda: ns_per_call(null, RECORDED_CALLS),
                "span": lambda: recorded_ns(lambda: ns_per_call(ours, RECORDED_CALLS)),
                "telemetry": lambda: ns_per_call(telemetry.recorded, RECORDED_CALLS),
                "plain": lambda: ns_per_await(plain, RECORDED_CALLS),
                "with": lambda: recorded_ns(lambda: ns_per_await(ours_in_a_task, RECORDED_CALLS)),
                "async": lambda: recorded_ns(lambda: ns_per_await(ours_async, RECORDED_CALLS)),
                "traced": lambda: traced.ns_recorded(TRACED_CALLS),
            }
        )
    calls = f"{RECORDED_CALLS:,} calls each inside a trajectory, {TRACED_CALLS} of verl's"
    record_spans("span_recorded", found, calls)


def record_spans(table: str, found: dict[str, list[float]], calls: str) -> None:
    """Write a table of spans."""
    rows = [
        row(NULLCONTEXT, found["null"], "ns"),
        row(SPAN, found["span"], "ns", against=NULLCONTEXT, of=found["null"]),
        row(OPENTELEMETRY, found["telemetry"], "ns", against=SPAN, of=found["span"]),
        row(PLAIN, found["plain"], "ns"),
        row(SPAN_IN_IT, found["with"], "ns", against=PLAIN, of=found["plain"]),
        row(ASYNC_SPAN, found["async"], "ns", against=PLAIN, of=found["plain"]),
        row(TRACE_OP, found["traced"], "ns", against=SPAN_IN_IT, of=found["with"]),
    ]
    method = (
        f"{ROUNDS} rounds, one after another in every round, {calls}, CPU time of the "
        "calling thread."
    )
    record(table, rows, method=method, peers=PEERS)


def recorded_ns(measured: Callable[[], float]) -> float:
    """Return what is measured in a trajectory, in a capture of its own."""
    with tempfile.TemporaryDirectory() as folder, captured(folder), trajectory(group="0", sample=0):
        return measured()


class OpenTelemetry:
    """OpenTelemetry's tracer, without an SDK and with one."""

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            SpanExporter,
            SpanExportResult,
        )

        class Exporter(SpanExporter):
            def export(self, spans: Any) -> SpanExportResult:
                return SpanExportResult.SUCCESS

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Exporter(), max_queue_size=1 << 16))
        self._idle, self._recording = trace.get_tracer("bench"), provider.get_tracer("bench")

    def idle(self) -> None:
        with self._idle.start_as_current_span("tool:search"):
            pass

    def recorded(self) -> None:
        with self._recording.start_as_current_span("tool:search"):
            pass


class TraceOp:
    """verl's decorator, without a backend and with mlflow."""

    def __init__(self) -> None:
        from verl.utils.rollout_trace import rollout_trace_op

        class Tool:
            @rollout_trace_op  # type: ignore[untyped-decorator]
            async def search(self, query: str = "a query") -> None:
                pass

        self.search = Tool().search

    def record(self, folder: str) -> None:
        """Switch the backend on."""
        from verl.utils.rollout_trace import RolloutTraceConfig

        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        RolloutTraceConfig.init("bench", "bench", backend="mlflow")

    def ns_recorded(self, calls: int) -> float:
        """Return nanoseconds per call in a trace of its own."""
        import mlflow
        from verl.utils.rollout_trace import rollout_trace_attr

        with rollout_trace_attr(sample_index=0, step=1, rollout_n=0):
            took = ns_per_await(self.search, calls)
        mlflow.flush_trace_async_logging()
        return took


def make_rollout(folder: str) -> None:
    """Capture 10,000 trajectories with 20 spans each,
    and print MB of memory and seconds of the stop.
    """

    async def play(number: int, seat: asyncio.Semaphore) -> None:
        async with (
            seat,
            trajectory(group=str(number // 8), sample=number % 8, validate=False) as made,
        ):
            for turn in range(SPANS // 4):
                with span("generate", request=f"{number}.{turn}"):
                    await asyncio.sleep(0.001)
                with span("tool:search"):
                    await asyncio.sleep(0.001)
                with span("environment:step"), span("wait:server"):
                    await asyncio.sleep(0)
            made.add(turns=SPANS // 4, tool_calls=SPANS // 4, min_version=1, max_version=1)

    async def rollout() -> None:
        seat = asyncio.Semaphore(AT_ONCE)
        await asyncio.gather(*(play(number, seat) for number in range(TRAJECTORIES)))

    process = psutil.Process()
    asyncio.run(rollout())  # what the loop itself needs is there when the capture begins
    before = process.memory_info().rss
    with captured(folder):
        asyncio.run(rollout())
        memory = (process.memory_info().rss - before) / 1e6
        begin = time.perf_counter()
    print(json.dumps([memory, time.perf_counter() - begin]))


MERGE = f"""
import io, contextlib
sys.path.insert(0, {str(ROOT)!r})
from verl_profiling.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["merge", folder])
rows = []
"""
REPORT = MERGE.replace("merge", "report")


def scale() -> None:
    """Record what 10,000 trajectories take: memory, disk, the stop, merging, reporting."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(5):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "run"
            command = [sys.executable, __file__, "make_rollout", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            memory, stop = json.loads(done.stdout.splitlines()[-1])
            [log] = folder.rglob("*.trajectories.jsonl.gz")
            found["memory"].append(memory)
            found["stop"].append(stop)
            found["disk"].append(log.stat().st_size / 1e6)
            found["merge"].append(measure(sys.executable, MERGE, folder)[0])
            found["report"].append(measure(sys.executable, REPORT, folder)[0])
            [timeline] = folder.rglob("timeline.json.gz")
            found["timeline"].append(timeline.stat().st_size / 1e6)
    rows = [
        row("memory of the process, until the capture ends", found["memory"], "MB"),
        row("stop and write", found["stop"], "s"),
        row("on disk", found["disk"], "MB"),
        row("`merge`", found["merge"], "CPU s"),
        row("the timeline", found["timeline"], "MB"),
        row("`report`", found["report"], "CPU s"),
    ]
    record(
        "trajectories",
        rows,
        method=f"{TRAJECTORIES:,} trajectories with {SPANS} spans each, {AT_ONCE} at once, "
        "in one process. "
        "5 runs, each in fresh processes, imports included.",
        peers={},
    )


def loop_of(trajectories: int) -> None:
    """Print what share of a core a captured event loop's lag and all of its process took,
    in percent.
    """

    async def wait(number: int) -> None:
        with trajectory(group=str(number)):
            for _ in range(round(LAG_S / 0.1)):
                with span("tool:search"):
                    await asyncio.sleep(0.1)

    async def shares() -> list[float]:
        tasks = [asyncio.create_task(wait(number)) for number in range(trajectories)]
        await asyncio.sleep(0.5)
        [clock] = [
            time.pthread_getcpuclockid(thread.ident or 0)
            for thread in threading.enumerate()
            if thread.name == "verl-profiling-loop-lag"
        ]
        clocks = (clock, time.CLOCK_PROCESS_CPUTIME_ID)
        begin, used = time.perf_counter(), [time.clock_gettime(clock) for clock in clocks]
        await asyncio.sleep(LAG_S - 1)
        now, seconds = [time.clock_gettime(clock) for clock in clocks], time.perf_counter() - begin
        await asyncio.gather(*tasks)
        return [100 * (end - start) / seconds for start, end in zip(used, now, strict=True)]

    with tempfile.TemporaryDirectory() as folder, captured(folder):
        print(json.dumps(asyncio.run(shares())))


def lag() -> None:
    """Record what measuring the lag of a loop takes."""
    rows = []
    for count, what in (
        (1, "one trajectory that waits"),
        (100, "100 trajectories, 1,000 spans a second"),
    ):
        found = []
        for _ in range(5):
            command = [sys.executable, __file__, "loop_of", str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        thread, process = zip(*found, strict=True)
        rows += [
            row(f"{what}: the thread that looks", thread, "% of a core"),
            row(f"{what}: all of the captured process", process, "% of a core"),
        ]
    method = f"CPU time over {LAG_S - 1:.0f} s, in 5 fresh processes each."
    record("loop_lag", rows, method=method, peers={})


def run() -> None:
    """Record the steps of a real run, of which every second one has its trajectories captured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(
                sys.executable,
                "-m",
                "recipes.agent_tiny.train",
                f"output_dir={folder}",
                f"steps={STEPS + 2}",
            ),
            *("profiling=e2e", "profiling.schedule.every=2", "agent.cold_start_share=0"),
            *("+profiling.roles.actor.enable=false", "+profiling.roles.rollout.enable=false"),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        steps = [
            json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()
        ][2:]
        captured_steps = {int(path.name[5:]) for path in Path(folder, "profiling").glob("step_*")}
    rows = []
    for what, key in (("the rollout", "rollout_seconds"), ("the step", "seconds")):
        with_it, without = (
            [step[key] for step in steps if (step["step"] in captured_steps) == wanted]
            for wanted in (True, False)
        )
        rows += [
            row(f"{what}, not captured", without, "s"),
            row(f"{what}, captured", with_it, "s", against="not captured", of=without),
        ]
    method = (
        f"{STEPS} steps of one run of `recipes/agent_tiny`, every second one captured, by "
        "the clock; only "
        "agent loops are recorded, and environments never start cold."
    )
    record("trajectories_run", rows, method=method, peers={})


if __name__ == "__main__":
    if sys.argv[1:2] == ["make_rollout"]:
        make_rollout(sys.argv[2])
    elif sys.argv[1:2] == ["loop_of"]:
        loop_of(int(sys.argv[2]))
    else:
        parts = {"spans": spans, "scale": scale, "lag": lag, "run": run}
        for name in sys.argv[1:] or parts:
            parts[name]()
