"""Makes step folders that are drawn by hand: stages and kernels in seconds after the step's begin."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path

from verl_profiling.controller.trace import write_controller_trace
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import MANIFEST_NAME, Artifact, CaptureResult, Manifest, Request, StageSpan
from verl_profiling.report.build import build_report
from verl_profiling.report.model import Report
from verl_profiling.run_files import write_json_atomically
from verl_profiling.timeline.inputs import find_steps

S = 1_000_000_000  # the synthetic steps are drawn in seconds
BASE = 1_790_000_000 * S
STAGES = [("rollout", 0, 4), ("reward", 4, 5), ("update_actor", 5, 8), ("update_weights", 8, 9)]


@dataclass
class Worker:
    """One worker of a synthetic step, in seconds after its begin."""

    role: str
    rank: int = 0
    replica: int | None = None
    stages: list[tuple[str, float, float]] = field(default_factory=list)
    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    iterations: list[tuple[str, float, float]] = field(default_factory=list)
    requests: list[tuple[float, float, int]] = field(default_factory=list)
    recorded: tuple[float, float] = (0.0, 10.0)


def ns(seconds: float) -> int:
    """Return unix nanoseconds of an instant of the step."""
    return BASE + round(seconds * S)


def report_of(
    folder: Path, stages: list[tuple[str, float, float]], workers: list[Worker], end: float = 10.0
) -> Report:
    """Write a step that is drawn by hand, and return its report."""
    results = []
    for worker in workers:
        identity = WorkerIdentity(role=worker.role, rank=worker.rank, replica=worker.replica)
        lane = identity.lane(0)
        events = [
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": begin * 1e6,
                "dur": (stop - begin) * 1e6,
            }
            for cat, spans in (("kernel", worker.kernels), ("user_annotation", worker.iterations))
            for name, begin, stop in spans
        ]
        path = folder / f"{lane}.torch.json.gz"
        path.write_bytes(
            gzip.compress(json.dumps({"baseTimeNanoseconds": BASE, "traceEvents": events}).encode())
        )
        begin, stop = worker.recorded
        results.append(
            CaptureResult(
                identity=identity,
                artifacts=[
                    Artifact(
                        path=path.name,
                        lane=lane,
                        tool="torch",
                        status="ok",
                        begin_ns=ns(begin),
                        end_ns=ns(stop),
                    )
                ],
                stages=[StageSpan(name, ns(a), ns(b)) for name, a, b in worker.stages],
                requests=[
                    Request(
                        replica=worker.replica or 0,
                        begin_ns=ns(a),
                        end_ns=ns(b),
                        prompt_tokens=10,
                        response_tokens=tokens,
                    )
                    for a, b, tokens in worker.requests
                ],
            )
        )
    manifest = Manifest(
        run_id="drawn",
        capture_id="drawn-1",
        step=1,
        steps=[1],
        begin_ns=ns(0),
        end_ns=ns(end),
        controller=WorkerIdentity(role="controller"),
        stages=[StageSpan(name, ns(a), ns(b)) for name, a, b in stages],
        workers=results,
    )
    write_controller_trace(folder, manifest)
    write_json_atomically(folder / MANIFEST_NAME, manifest)
    (inputs,) = find_steps(folder)
    return build_report(inputs)
