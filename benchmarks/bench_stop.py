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

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.workers import CaptureMixin

ROUNDS = 7

FIRST_START = """
import tempfile, time
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.workers import CaptureMixin
import torch
worker = CaptureMixin()
begin = time.perf_counter()
worker.init_capture({"enable": True}, role="actor")
init = time.perf_counter() - begin
with tempfile.TemporaryDirectory() as folder:
    begin = time.perf_counter()
    worker.start_capture(CaptureRequest(capture_id="1", run_id="bench", step=1, folder=folder))
    start = time.perf_counter() - begin
    worker.stop_capture(finish_s=30.0)
print(init, start)
"""


def make_events(number: int) -> None:
    """Run ops until about ``number`` events are recorded: in torch 2.13 a matrix product makes five."""
    left, right = torch.ones(4, 4), torch.ones(4, 4)
    for _ in range(number // 5):
        left @ right


def torch_alone(events: int, folder: Path) -> float:
    """Return seconds of torch's ``stop`` and raw JSON export."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.start()
    make_events(events)
    begin = time.perf_counter()
    profiler.stop()
    profiler.export_chrome_trace(str(folder / "torch.json"))
    return time.perf_counter() - begin


def ours(events: int, folder: Path, worker: CaptureMixin, number: int) -> tuple[float, float, int]:
    """Return seconds of ``stop_capture``, seconds until the artifact is finished, and its events."""
    worker.start_capture(CaptureRequest(capture_id=str(number), run_id="bench", step=1, folder=str(folder)))
    make_events(events)
    begin = time.perf_counter()
    reply = worker.stop_capture()
    stopped = time.perf_counter() - begin
    finished = [*reply.finished, *worker.stop_capture(finish_s=60.0).finished]
    done = time.perf_counter() - begin
    (artifact,) = (news.artifact for news in finished)
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
    init_s, start_s = (statistics.median(column) for column in zip(*starts, strict=True))
    print(f"first start_capture after init_capture {start_s * 1000:8.1f} ms   (goal: under 50)")
    print(f"  init_capture itself, in a new process {init_s:6.2f} s")

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
    ratios = [mine / theirs for mine, theirs in zip(stopped, alone, strict=True)]
    print(f"stopping a trace of {statistics.median(counts)} events, {ROUNDS} rounds in turn")
    print(f"  torch stop + raw JSON export  {statistics.median(alone) * 1000:8.0f} ms")
    print(f"  stop_capture                  {statistics.median(stopped) * 1000:8.0f} ms")
    print(f"  ratio, pair by pair           {statistics.median(ratios):8.2f}      (goal: at most 1.15)")
    print(f"  compressed and verified after {statistics.median(done) * 1000:8.0f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
