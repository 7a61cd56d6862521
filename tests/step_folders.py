"""Makes step folders as a capture leaves them, from real torch.profiler traces."""

from __future__ import annotations

import gzip
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.identity import WorkerIdentity, artifact_name, step_folder_name
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    HostClock,
    Manifest,
    Request,
    Rpc,
    StageSpan,
    ToolSpan,
)

STEP = 12
WORKERS = ("actor_rank0", "actor_rank1", "rollout0_rank0")
STORED = Path(__file__).parent / "data" / "recordings.gz"


@dataclass(frozen=True)
class Recording:
    """One real trace and when it was taken."""

    trace: str
    begin_ns: int
    end_ns: int
    stage: StageSpan


def read_events(path: Path) -> list[dict]:
    """Return the events of a whole trace with the standard library, as a second opinion."""
    data = path.read_bytes()
    content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return content["traceEvents"] if isinstance(content, dict) else content


def spans_by_lane(timeline: Path) -> dict[str, list[dict]]:
    """Return the complete events of a timeline; a lane is the first word of its process's name."""
    events = read_events(timeline)
    lanes = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    found: dict[str, list[dict]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault(lanes[event["pid"]], []).append(event)
    return found


def unix_ns(trace: str) -> dict[str, list[int]]:
    """Return the begin of every complete event by name, in unix ns, with exact arithmetic."""
    content = json.loads(trace, parse_float=lambda text: text)
    found: dict[str, list[int]] = {}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            whole, _, fraction = str(event["ts"]).partition(".")
            ns = content["baseTimeNanoseconds"] + int(whole) * 1000 + int(fraction.ljust(3, "0"))
            found.setdefault(event["name"], []).append(ns)
    return found


def _train() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    for _ in range(10):
        model(torch.randn(4, 32)).square().mean().backward()


def _generate() -> None:
    import torch
    from torch.profiler import record_function

    with torch.no_grad():
        weights = torch.randn(32, 32)
        state = torch.randn(1, 32)
        for _ in range(30):
            with record_function("execute_context_0(0)_generation_1(1)"):
                state = torch.tanh(state @ weights)


def _record(stage: str, work: Callable[[], None]) -> Recording:
    from torch.profiler import ProfilerActivity, profile, record_function

    begin = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        stage_begin = time.time_ns()
        with record_function(stage):
            work()
        stage_end = time.time_ns()
    end = time.time_ns()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Recording(
            path.read_text(), begin, end, StageSpan(stage, stage_begin, stage_end, thread=7)
        )


@cache
def recordings() -> dict[str, Recording]:
    """Return a rollout and two training ranks,
    recorded once per test run where that is possible.
    """
    if importlib.util.find_spec("torch") is None:
        return msgspec.json.decode(gzip.decompress(STORED.read_bytes()), type=dict[str, Recording])
    return _recorded()


def _recorded() -> dict[str, Recording]:
    _record("warmup", _train)
    rollout = _record("rollout", _generate)
    return {
        "rollout0_rank0": rollout,
        "actor_rank0": _record("update_actor", _train),
        "actor_rank1": _record("update_actor", _train),
    }


def build_step(run: Path, *, step: int = STEP, mode: str = "e2e", rank1_clock_ns: int = 0) -> Path:
    """Write a whole step folder and return it."""
    folder = run / step_folder_name(step)
    folder.mkdir(parents=True)
    taken = recordings()
    begin, end = (
        taken["rollout0_rank0"].begin_ns - 1_000_000,
        taken["actor_rank1"].end_ns + 1_000_000,
    )
    workers = [
        _write_worker(folder, lane, mode, step, rank1_clock_ns if lane == "actor_rank1" else 0)
        for lane in WORKERS
    ]
    rollout, rank0, rank1 = (
        taken[lane] for lane in ("rollout0_rank0", "actor_rank0", "actor_rank1")
    )
    manifest = Manifest(
        run_id="run",
        capture_id=f"run-{step}",
        step=step,
        steps=[step],
        begin_ns=begin,
        end_ns=end,
        controller=WorkerIdentity(role="controller"),
        stages=[
            StageSpan("rollout", rollout.begin_ns, rollout.end_ns),
            StageSpan("update_actor", rank0.begin_ns, rank1.end_ns),
        ],
        rpcs=[Rpc(worker.name, "start_capture", begin, begin + 500_000) for worker in workers],
        workers=workers,
        clocks=[
            HostClock(
                host="other",
                clock_domain="other",
                offset_ns=rank1_clock_ns,
                error_ns=2_000,
                closing_offset_ns=rank1_clock_ns + 500,
                closing_error_ns=2_000,
                samples=8,
            )
        ],
    )
    write_json_atomically(folder / MANIFEST_NAME, manifest)
    return folder


def rewrite(folder: Path, **changes: Any) -> None:
    """Change what the manifest of a step says."""
    manifest = msgspec.structs.replace(read_manifest(folder), **changes)
    write_json_atomically(folder / MANIFEST_NAME, manifest)


def rewrite_worker(folder: Path, *names: str, **changes: Any) -> None:
    """Change what the manifest of a step says of some workers; of all, if none is named."""
    workers = [
        msgspec.structs.replace(worker, **changes) if worker.name in names or not names else worker
        for worker in read_manifest(folder).workers
    ]
    rewrite(folder, workers=workers)


def with_facts(folder: Path) -> Path:
    """Add two requests, and the peaks and the cost of actor rank 0, to a step."""
    begin = read_manifest(folder).begin_ns
    requests = [
        Request(
            replica=0, begin_ns=begin, end_ns=begin + 200_000, prompt_tokens=4, response_tokens=9
        ),
        Request(
            replica=0,
            begin_ns=begin + 50_000,
            first_token_ns=begin + 60_000,
            end_ns=begin + 150_000,
            prompt_tokens=4,
            response_tokens=2,
            policy_version=3,
            failed=True,
        ),
    ]
    rewrite_worker(
        folder,
        "actor_rank0",
        tool_spans=[
            ToolSpan("start", begin - 250_000_000, begin),
            ToolSpan("stop", begin + 10**9, begin + 2_500_000_000),
        ],
        metrics={"stage/update_actor/process_peak_rss_bytes": 3e9, "throughput": 2.0},
    )
    rewrite_worker(folder, "rollout0", requests=requests)
    return folder


def _write_worker(folder: Path, lane: str, mode: str, step: int, clock_ns: int) -> CaptureResult:
    recording = recordings()[lane]
    role, replica = ("rollout", 0) if lane.startswith("rollout") else ("actor", None)
    stage = recording.stage.name if mode == "discrete" else None
    name = artifact_name(lane, ".torch.json.gz", stage)
    content = json.loads(recording.trace)
    trace = recording.trace.replace(
        f'"baseTimeNanoseconds": {content["baseTimeNanoseconds"]}',
        f'"baseTimeNanoseconds": {content["baseTimeNanoseconds"] + clock_ns}',
    )
    (folder / name).write_bytes(gzip.compress(trace.encode(), 1))
    own = recording.stage
    return CaptureResult(
        identity=WorkerIdentity(
            role=role,
            rank=int(lane[-1]),
            world_size=1 if replica == 0 else 2,
            replica=replica,
            host="other" if lane == "actor_rank1" else "here",
            clock_domain="other" if lane == "actor_rank1" else "here",
        ),
        step=step,
        mode=mode,
        tools=["torch"],
        artifacts=[
            Artifact(
                path=name,
                lane=lane,
                tool="torch",
                status="pending",
                stage=stage,
                begin_ns=recording.begin_ns + clock_ns,
                end_ns=recording.end_ns + clock_ns,
            )
        ],
        stages=[
            StageSpan(own.name, own.begin_ns + clock_ns, own.end_ns + clock_ns, thread=own.thread)
        ],
    )


if __name__ == "__main__":
    STORED.write_bytes(gzip.compress(msgspec.json.encode(_recorded()), mtime=0))
