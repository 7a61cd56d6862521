"""Captures one process over and over, and samples what it holds: memory, descriptors, threads, files."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from verl_profiling import ProfilingConfig, stage
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.session import process_session
from verl_profiling.identity import WorkerIdentity

STAGES = ("update_critic", "update_actor")
SAMPLES = 24


@dataclass
class Sample:
    """What the process held after a number of captures."""

    captures: int
    rss_bytes: int
    descriptors: int
    threads: int
    temporary_files: int


@dataclass
class Growth:
    """What a number of captures added, by the second half of the samples.

    Attributes:
        captures: How many there were.
        rss_bytes: Resident bytes that one capture adds: the slope of a line through the samples.
        descriptors: Most descriptors in the second half, less the most in the first.
        threads: Most threads in the second half, less the most in the first.
        temporary_files: The same of files in the folder for temporary files.
    """

    captures: int
    rss_bytes: float
    descriptors: int
    threads: int
    temporary_files: int


def capture_often(tool: str, mode: str, captures: int, folder: Path) -> list[Sample]:
    """Capture this process that often, and check each result; its temporary files are in ``folder``."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    config = ProfilingConfig.from_any({"enable": True, "tool": tool, "mode": mode})
    worker, session = WorkerIdentity(role="actor"), process_session()
    session.register(config, worker)
    samples = []
    for number in range(1, captures + 1):
        step = folder / f"step_{number:06d}"
        request = CaptureRequest(capture_id=str(number), run_id="soak", step=number, folder=str(step))
        session.start(request, worker)
        for name in STAGES:
            with stage(name):
                _work(tool)
        reply = session.stop(request.capture_id, 60.0)
        expected = 0 if tool == "spans" else len(STAGES) if mode == "discrete" else 1
        written = sorted(path.name for path in step.iterdir() if not path.name.endswith(".result.json"))
        if reply.result.status != "ok" or len(written) != expected:
            raise SystemExit(f"capture {number}: {reply.result.status} {reply.result.reason} {written}")
        shutil.rmtree(step)
        if number % max(1, captures // SAMPLES) == 0:
            samples.append(_sample(number, folder))
    return samples


def growth(samples: Sequence[Sample]) -> Growth:
    """Return what the captures added."""
    half = len(samples) // 2
    early, late = samples[:half], samples[half:]
    mean_captures = sum(sample.captures for sample in late) / len(late)
    mean_bytes = sum(sample.rss_bytes for sample in late) / len(late)
    slope = sum((s.captures - mean_captures) * (s.rss_bytes - mean_bytes) for s in late) / sum(
        (s.captures - mean_captures) ** 2 for s in late
    )

    def more(what: str) -> int:
        return max(getattr(s, what) for s in late) - max(getattr(s, what) for s in early)

    return Growth(
        captures=samples[-1].captures,
        rss_bytes=slope,
        descriptors=more("descriptors"),
        threads=more("threads"),
        temporary_files=more("temporary_files"),
    )


class ManyCaptures:
    """The same in a Ray actor."""

    def growth(self, tool: str, mode: str, captures: int, folder: Path) -> Growth:
        """Return what the captures added."""
        return growth(capture_often(tool, mode, captures, folder))


def _work(tool: str) -> None:
    if tool != "torch":
        return
    import torch

    left = torch.ones(4, 4)
    for _ in range(20):
        left = left @ left * 0.1


def _sample(captures: int, folder: Path) -> Sample:
    gc.collect()
    process = psutil.Process()
    return Sample(
        captures=captures,
        rss_bytes=process.memory_info().rss,
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        temporary_files=sum(1 for _ in folder.rglob("*")),
    )


if __name__ == "__main__":
    tool, mode, captures, folder = sys.argv[1:]
    print(json.dumps(asdict(growth(capture_often(tool, mode, int(captures), Path(folder))))))
