"""Makes step folders that are drawn by hand:
stages and kernels in seconds after the step's begin.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from verl_profiling.analysis import open_step
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    Device,
    Manifest,
    Request,
    Rpc,
    StageSpan,
    StepSpan,
    ToolSpan,
)
from verl_profiling.report.model import Report
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.step import StepInputs

Drawn = tuple[str, float, float]
Kernel = tuple[str, float, float] | tuple[str, float, float, dict[str, Any]]

S = 1_000_000_000  # the synthetic steps are drawn in seconds
BASE = 1_790_000_000 * S
STAGES = [("rollout", 0, 4), ("reward", 4, 5), ("update_actor", 5, 8), ("update_weights", 8, 9)]


@dataclass
class Worker:
    """One worker of a synthetic step, in seconds after its begin."""

    role: str
    rank: int = 0
    replica: int | None = None
    stages: Sequence[Drawn | tuple[str, float, float, int]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    kernels: Sequence[Kernel] = field(default_factory=list)
    operators: list[Drawn] = field(default_factory=list)
    calls: Sequence[Kernel] = field(default_factory=list)
    iterations: list[Drawn] = field(default_factory=list)
    requests: list[tuple[float, float, int]] = field(default_factory=list)
    recorded: tuple[float, float] = (0.0, 10.0)
    tool: list[tuple[str, float, float, str | None]] = field(default_factory=list)
    mode: str = "e2e"
    logged: bool = False
    pending: list[float] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)


def engine(replica: int, *spans: tuple[float, float], **more: Any) -> Worker:
    """Return an engine that decodes in each of some spans."""
    return Worker(
        "rollout",
        replica=replica,
        kernels=[("attention", *span) for span in spans],
        iterations=[("execute_context_0(0)_generation_4(4)", *span) for span in spans],
        **more,
    )


def in_group(
    kernel: Drawn, ranks: list[int], collective: str = "allreduce", name: str = "1"
) -> Kernel:
    """Return a kernel that names its process group, in the words of Kineto."""
    said = {"Collective name": collective, "Process Group Name": name}
    return (*kernel, {**said, "Process Group Ranks": str(ranks), "Group size": len(ranks)})


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
    """Write a step that is drawn by hand, and return its report."""
    drawn_inputs(folder, stages, workers, end, calls)
    return open_step(folder).report()


def drawn_inputs(
    folder: Path,
    stages: Sequence[Drawn | tuple[str, float, float, int]],
    workers: Sequence[Worker],
    end: float = 10.0,
    calls: Sequence[Drawn] = (),
    steps: Sequence[StepSpan] = (),
) -> StepInputs:
    """Write a capture that is drawn by hand, and return what is found of it."""
    groups = Counter((worker.role, worker.replica) for worker in workers)
    manifest = Manifest(
        run_id="drawn",
        capture_id="drawn-1",
        step=1,
        steps=[span.step for span in steps] or [1],
        step_spans=list(steps),
        begin_ns=ns(0),
        end_ns=ns(end),
        controller=WorkerIdentity(role="controller"),
        stages=_spans(stages),
        rpcs=[Rpc("worker", name, ns(a), ns(b)) for name, a, b in calls],
        workers=[
            _drawn_result(folder, worker, groups[worker.role, worker.replica]) for worker in workers
        ],
    )
    write_json_atomically(folder / MANIFEST_NAME, manifest)
    (inputs,) = find_steps(folder)
    return inputs


def _spans(stages: Sequence[Drawn | tuple[str, float, float, int]]) -> list[StageSpan]:
    return [StageSpan(name, ns(a), ns(b), depth=sum(depth)) for name, a, b, *depth in stages]


def _drawn_result(folder: Path, worker: Worker, peers: int) -> CaptureResult:
    """Write the trace of a worker, and return what it says of itself."""
    identity = WorkerIdentity(role=worker.role, rank=worker.rank, replica=worker.replica)
    lane = identity.lane(0)
    path = folder / f"{lane}.torch.json.gz"
    info = {"world_size": peers, "pg_config": [{"ranks": ranks} for ranks in worker.groups]}
    content = {
        "baseTimeNanoseconds": BASE,
        "distributedInfo": info,
        "traceEvents": [
            *_events("kernel", worker.kernels),
            *_events("cpu_op", worker.operators),
            *_events("cuda_runtime", worker.calls),
            *_events("user_annotation", worker.iterations),
        ],
    }
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    begin, stop = (ns(at) for at in worker.recorded)
    trace = Artifact(
        path=path.name, lane=lane, tool="torch", status="ok", begin_ns=begin, end_ns=stop
    )
    return CaptureResult(
        identity=identity,
        mode=worker.mode,
        devices=worker.devices,
        requests_logged=worker.logged,
        pending_since_ns=[ns(since) for since in worker.pending],
        tool_spans=[ToolSpan(name, ns(a), ns(b), stage) for name, a, b, stage in worker.tool],
        artifacts=[trace],
        stages=_spans(worker.stages),
        pauses=[StageSpan("gc", ns(a), ns(b)) for a, b in worker.pauses],
        requests=[
            Request(
                replica=worker.replica or 0,
                id=f"{worker.replica}-{number}",
                begin_ns=ns(a),
                arrival_ns=ns(a),
                scheduled_ns=ns(a + (b - a) / 10),
                first_token_ns=ns(a + (b - a) / 5),
                end_ns=ns(b),
                prompt_tokens=10,
                response_tokens=tokens,
                cached_tokens=5,
                preemptions=number % 2,
            )
            for number, (a, b, tokens) in enumerate(worker.requests)
        ],
    )


def _events(category: str, spans: Sequence[tuple]) -> list[dict[str, Any]]:
    """Return the complete events of a trace; a span may have arguments behind its end."""
    place = {"ph": "X", "pid": 0, "tid": 7, "cat": category}
    return [
        {**place, "name": name, "ts": begin * 1e6, "dur": (stop - begin) * 1e6, "args": args}
        for name, begin, stop, *rest in spans
        for args in rest or [{}]
    ]


FAULTS = ("healthy", "slow rank", "long tail", "host-bound", "slow weight sync")
# Seconds of the generation, the update, the weight sync, and between kernels, with the fault.
ILL = {"long tail": 9.0, "slow rank": 6.6, "slow weight sync": 3.0, "host-bound": 0.06}


def whole_step(
    folder: Path,
    *,
    ranks: int = 8,
    replicas: int = 4,
    fault: str = "healthy",
    slow_rank: int | None = None,
) -> Report:
    """Write a GRPO step, and return its report."""
    times = {"long tail": 4.2, "slow rank": 3.0, "slow weight sync": 0.25, "host-bound": 0.002}
    times |= {name: ill for name, ill in ILL.items() if name == fault}
    generated, updated, synced, gap = times.values()
    slow = (
        range(ranks)
        if fault != "slow rank"
        else [ranks * 5 // 8 if slow_rank is None else slow_rank]
    )
    begins = list(accumulate((generated + 0.2, 0.3, 1.1, updated, synced), initial=0.05))
    names = ("rollout", "reward", "old_log_prob", "update_actor", "update_weights")
    stages = list(zip(names, begins, begins[1:], strict=False))
    end = begins[-1] + 0.05
    by_name = {name: (begin, stop) for name, begin, stop in stages}
    own = [(name, *by_name[name]) for name in names[2:]]
    workers, world = [], list(range(ranks))
    for rank in world:
        kernels = _gemms(*by_name["old_log_prob"], 0.002)
        begin, stop = by_name["update_actor"]
        for part in range(6):
            first, last = (begin + (stop - begin) * edge / 6 for edge in (part, part + 1))
            works = (last - first) * (0.92 if rank in slow else 0.92 * 3.0 / updated)
            kernels += _gemms(first, first + works - 0.003 * (rank % 3), gap)
            kernels.append(("ncclDevKernel_AllReduce_Sum_f32", kernels[-1][2], last))
        kernels.append(("ncclDevKernel_Broadcast", begins[-1] - 0.2, begins[-1]))
        workers.append(
            Worker("actor", rank, stages=own, kernels=kernels, recorded=(0, end), groups=[world])
        )
    stops = [4.0 + 0.2 * replica / replicas for replica in range(replicas)]
    if fault == "long tail":
        stops[-1] = generated
    for replica, stop in enumerate(stops):
        workers.append(_engine_of_a_step(replica, stop, end))
    folder.mkdir(parents=True, exist_ok=True)
    return report_of(folder, stages, workers, end)


def _engine_of_a_step(replica: int, stop: float, end: float) -> Worker:
    """Return an engine with 32 requests that end one after the other, and a last one."""
    runs = [
        ("attention", 0.1 + 0.05 * i, 0.145 + 0.05 * i) for i in range(int((stop - 0.1) / 0.05))
    ]
    name = "execute_context_0(0)_generation_8(8)"
    return Worker(
        "rollout",
        replica=replica,
        stages=[("rollout", 0.08, stop)],
        kernels=runs,
        iterations=[(name, begin, until) for _, begin, until in runs],
        requests=[*((0.1, 1.5 + 2.5 * i / 32, 40 + 5 * i) for i in range(32)), (0.1, stop, 900)],
        recorded=(0, end),
    )


def _gemms(begin: float, end: float, gap: float) -> list[tuple[str, float, float]]:
    """Return kernels of 30 ms with a gap behind each."""
    count = max(int((end - begin) / (0.03 + gap)), 1)
    took = (end - begin) / count
    return [("gemm", begin + i * took, begin + (i + 1) * took - gap) for i in range(count)]
