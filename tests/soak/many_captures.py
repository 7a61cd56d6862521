"""Captures one process over and over: ``python -m tests.soak.many_captures
TOOL MODE CAPTURES FOLDER``.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

from verl_profiling import ProfilingConfig, stage
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture.session import process_session
from verl_profiling.identity import WorkerIdentity

STAGES = ("update_critic", "update_actor")
SAMPLES = 24


def growth(tool: str, mode: str, captures: int, folder: Path) -> dict[str, float]:
    """Return what captures of this process add, by the second half of them;
    ``folder`` has its files.
    """
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    config = ProfilingConfig.from_any({"enable": True, "tool": tool, "mode": mode})
    worker, session = WorkerIdentity(role="actor"), process_session()
    session.register(config, worker)
    samples = []
    for number in range(1, captures + 1):
        step = folder / f"step_{number:06d}"
        request = CaptureStart(capture_id=str(number), run_id="soak", step=number, folder=str(step))
        session.start(request, worker)
        for name in STAGES:
            with stage(name):
                _work(tool)
        reply = session.stop(request.capture_id, 60.0)
        expected = 0 if tool == "spans" else len(STAGES) if mode == "discrete" else 1
        written = sorted(
            path.name for path in step.iterdir() if not path.name.endswith(".result.json")
        )
        if reply.result.status != "ok" or len(written) != expected:
            raise SystemExit(
                f"capture {number}: {reply.result.status} {reply.result.reason} {written}"
            )
        shutil.rmtree(step)
        if number % max(1, captures // SAMPLES) == 0:
            gc.collect()
            process = psutil.Process()
            held = (process.num_fds(), process.num_threads(), sum(1 for _ in folder.rglob("*")))
            samples.append((number, process.memory_info().rss, *held))
    early, late = np.array_split(np.array(samples), 2)
    slope = np.polyfit(late[:, 0], late[:, 1], 1)[0]
    more = (late[:, 2:].max(axis=0) - early[:, 2:].max(axis=0)).tolist()
    return dict(
        zip(("rss_bytes", "descriptors", "threads", "files"), (float(slope), *more), strict=True)
    )


def _work(tool: str) -> None:
    if tool == "torch":
        import torch

        left = torch.ones(4, 4)
        for _ in range(20):
            left = left @ left * 0.1


if __name__ == "__main__":
    tool, mode, captures, folder = sys.argv[1:]
    print(json.dumps(growth(tool, mode, int(captures), Path(folder))))
