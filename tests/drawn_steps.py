"""Makes step folders that are drawn by hand: stages and kernels in seconds after the step's begin."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_profiling.controller.trace import write_controller_trace
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    Manifest,
    Request,
    Rpc,
    StageSpan,
    ToolSpan,
)
from verl_profiling.report.build import build_report
from verl_profiling.report.model import Report
from verl_profiling.run_files import write_json_atomically
from verl_profiling.timeline.inputs import find_steps

Drawn = tuple[str, float, float]

S = 1_000_000_000  # the synthetic steps are drawn in seconds
BASE = 1_790_000_000 * S
STAGES = [("rollout", 0, 4), ("reward", 4, 5), ("update_actor", 5, 8), ("update_weights", 8, 9)]


@dataclass
class Worker:
    """One worker of a synthetic step, in seconds after its begin.

    Attributes:
        kernels: What its device ran.
        operators: What its host ran.
        calls: Calls of the CUDA runtime that its host made.
        tool: Starts and stops of its tool, each with the stage that it recorded.
    """

    role: str
    rank: int = 0
    replica: int | None = None
    stages: list[Drawn] = field(default_factory=list)
    kernels: list[Drawn] = field(default_factory=list)
    operators: list[Drawn] = field(default_factory=list)
    calls: list[Drawn] = field(default_factory=list)
    iterations: list[Drawn] = field(default_factory=list)
    requests: list[tuple[float, float, int]] = field(default_factory=list)
    recorded: tuple[float, float] = (0.0, 10.0)
    tool: list[tuple[str, float, float, str | None]] = field(default_factory=list)
    mode: str = "e2e"
    host: str = ""
    cores: int = 0


def ns(seconds: float) -> int:
    """Return unix nanoseconds of an instant of the step."""
    return BASE + round(seconds * S)


def report_of(
    folder: Path,
    stages: Sequence[Drawn | tuple[str, float, float, int]],
    workers: Sequence[Worker],
    end: float = 10.0,
    calls: Sequence[Drawn] = (),
) -> Report:
    """Write a step that is drawn by hand, and return its report.

    Args:
        folder: Where it is written.
        stages: The controller's stages, with their depth where it is not 0.
        workers: Its workers.
        end: When it ends.
        calls: Calls of the controller that start and stop the capture.
    """
    results = []
    for worker in workers:
        identity = WorkerIdentity(
            role=worker.role, rank=worker.rank, replica=worker.replica, host=worker.host
        )
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
            for cat, spans in (
                ("kernel", worker.kernels),
                ("cpu_op", worker.operators),
                ("cuda_runtime", worker.calls),
                ("user_annotation", worker.iterations),
            )
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
                mode=worker.mode,
                cores=worker.cores,
                tool_spans=[ToolSpan(name, ns(a), ns(b), stage) for name, a, b, stage in worker.tool],
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
        stages=[StageSpan(name, ns(a), ns(b), depth=sum(depth)) for name, a, b, *depth in stages],
        rpcs=[Rpc("worker", name, ns(a), ns(b)) for name, a, b in calls],
        workers=results,
    )
    write_controller_trace(folder, manifest)
    write_json_atomically(folder / MANIFEST_NAME, manifest)
    (inputs,) = find_steps(folder)
    return build_report(inputs)
