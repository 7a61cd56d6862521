"""What starting and stopping a capture costs, against torch's own profiler doing the same.

Run: ``python benchmarks/bench_stop.py [EVENTS]`` (default 100000). Medians of interleaved rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from results import record, row

from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.workers import CaptureMixin

ROUNDS = 7

FIRST_START = """
import tempfile, time
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.workers import CaptureMixin
import torch
worker = CaptureMixin()
begin = time.process_time()
worker.init_capture({"enable": True}, role="actor")
init = time.process_time() - begin
with tempfile.TemporaryDirectory() as folder:
    begin = time.process_time()
    worker.start_capture(CaptureStart(capture_id="1", run_id="bench", step=1, folder=folder))
    start = time.process_time() - begin
    worker.stop_capture(finish_s=30.0)
print(init, start)
"""


def make_events(number: int) -> None:
    """Run ops until about ``number`` events are recorded:
    in torch 2.13 a matrix product makes five.
    """
    left, right = torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(number // 5):
        left @ right


def torch_alone(events: int, folder: Path) -> float:
    """Return seconds of torch's ``stop`` and raw JSON export."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    make_events(events)
    begin = time.process_time()
    profiler.stop()
    profiler.export_chrome_trace(str(folder / "torch.json"))
    return time.process_time() - begin


def ours(events: int, folder: Path, worker: CaptureMixin, number: int) -> tuple[float, float, int]:
    """Return seconds of ``stop_capture``, seconds until the artifact is finished,
    and its events.
    """
    worker.start_capture(
        CaptureStart(capture_id=str(number), run_id="bench", step=1, folder=str(folder))
    )
    make_events(events)
    begin = time.process_time()
    worker.stop_capture()
    stopped = time.process_time() - begin
    (artifact,) = worker.stop_capture(finish_s=60.0).result.artifacts
    done = time.process_time() - begin
    if artifact.status != "ok":
        raise SystemExit(f"the artifact is {artifact.status}: {artifact.reason}")
    return stopped, done, artifact.events or 0


def main(events: int) -> None:
    """Measure and print."""
    starts = []
    for _ in range(5):
        command = [sys.executable, "-c", FIRST_START]
        output = subprocess.run(command, capture_output=True, text=True, check=True)
        starts.append([float(word) for word in output.stdout.split()])
    inits, firsts = zip(*starts, strict=True)
    worker = CaptureMixin()
    worker.init_capture({"enable": True, "tools": {"torch": {"activities": ["cpu"]}}}, role="actor")
    alone, stopped, done, counts = [], [], [], []
    for number in range(ROUNDS + 1):
        with tempfile.TemporaryDirectory() as folder:
            first = torch_alone(events, Path(folder))
            second = ours(events, Path(folder), worker, number)
        if number:
            alone.append(first)
            stopped.append(second[0])
            done.append(second[1])
            counts.append(second[2])
    theirs = "torch's own stop and raw JSON export"
    record(
        "stop",
        [
            row("`init_capture` in a new process (torch's slow imports)", inits, "CPU s"),
            row("first `start_capture` after it", [1000 * start for start in firsts], "CPU ms"),
            row(f"{theirs}, {statistics.median(counts):,.0f} events", alone, "CPU s"),
            row("`stop_capture` of as many", stopped, "CPU s", against=theirs, of=alone),
            row(
                "until the artifact is compressed and read back, in the background",
                done,
                "CPU s",
                against="`stop_capture`",
                of=stopped,
            ),
        ],
        method=(
            f"{ROUNDS} rounds of both in turn, {len(starts)} new processes, CPU time of "
            "all threads."
        ),
        peers={
            theirs: "torch.profiler.profile, activities CPU, no options, stop() and "
            "export_chrome_trace()"
        },
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
