"""The inputs that are changed: small copies of real traces, step folders,
notes of nsys and its exports.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import step_folders
from drawn_summaries import summary
from step_folders import Recording, build_step, with_facts

from tests.fuzz.mutations import garble_bytes, garble_json
from verl_profiling.analysis import open_step
from verl_profiling.files.run_files import read_manifest, write_json_atomically, write_result
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import Artifact, CaptureResult, Manifest, RunInfo
from verl_profiling.watch.log_writer import WatchLog

__all__ = ["INPUTS", "Input", "build"]

DATA = Path(__file__).parent.parent / "data"
EVENTS = 40


@dataclass(frozen=True)
class Input:
    target: str
    path: str
    commands: tuple[str, ...]
    change: Callable[[bytes, Random], bytes]


def _change_trace(data: bytes, random: Random) -> bytes:
    """Put a real trace there, compressed or not, and change its bytes,
    its JSON or its compressed bytes.
    """
    content = random.choice(traces())
    way = random.choice(("bytes", "bytes", "json", "json", "json", "compressed"))
    if way == "json":
        content = garble_json(content, random)
    elif way == "bytes":
        content = garble_bytes(content, random)
    if way != "compressed" and random.random() < 0.5:
        return content
    packed = gzip.compress(content, 1, mtime=0)
    return garble_bytes(packed, random) if way == "compressed" else packed


def _change_text(data: bytes, random: Random) -> bytes:
    return garble_json(data, random) if random.random() < 0.7 else garble_bytes(data, random)


def _change_requests(data: bytes, random: Random) -> bytes:
    return garble_json(data, random, within=("workers", "requests"))


def _change_notes(data: bytes, random: Random) -> bytes:
    lines = data.splitlines()
    index = random.randrange(len(lines))
    lines[index] = _change_text(lines[index], random)
    return b"\n".join(lines)


_TABLES = {
    "StringIds": ("id INTEGER, value", [(1, "gemm"), (3, "cudaLaunchKernel"), (4, "stage")]),
    "TARGET_INFO_SESSION_START_TIME": ("utcEpochNs INTEGER", [(1_700_000_000_000_000_000,)]),
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start, end, deviceId, streamId, correlationId, demangledName",
        [(5001, 9003, 0, 7, 42, 1), (9100, 9300, 0, 7, 44, 1)],
    ),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start, end, deviceId, streamId, correlationId, bytes, copyKind",
        [(9100, 9200, 0, 7, 43, 4096, 1)],
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start, end, globalTid, correlationId, nameId",
        [(4000, 4500, 99, 42, 3)],
    ),
    "NVTX_EVENTS": (
        "start, end, eventType, text, globalTid, textId",
        [(3000, 9900, 60, "update_actor", 99, None), (1000, 2000, 59, None, 99, 4)],
    ),
}


def _export(path: Path) -> None:
    database = sqlite3.connect(path)
    for name, (columns, rows) in _TABLES.items():
        database.execute(f"CREATE TABLE {name} ({columns})")
        marks = ", ".join("?" * len(rows[0]))
        database.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
    database.commit()
    database.close()


_STEP = ("check", "merge", "report", "diff", "analysis")
_FILE = ("check", "check", "merge", "report", "diff", "analysis")
_SOUND, _RUN = "sound/step_000012", "run"
_EXPORT = "run/nsys/host.1.1.sqlite"
INPUTS = {
    "trace": Input("t.json.gz", "t.json.gz", _FILE, _change_trace),
    "trace of a step": Input(f"{_SOUND}/actor_rank0.torch.json.gz", _SOUND, _STEP, _change_trace),
    "manifest": Input(f"{_SOUND}/manifest.json", "sound", _STEP, _change_text),
    "result": Input(f"{_SOUND}/actor_rank0.result.json", "sound", _STEP, _change_text),
    "requests": Input(f"{_SOUND}/manifest.json", _SOUND, _STEP, _change_requests),
    "run.json": Input("run/run.json", _RUN, (*_STEP, "collect"), _change_text),
    "watch log": Input(
        "run/watch.jsonl", _RUN, ("check", "report", "diff", "analysis", "top"), _change_notes
    ),
    "begun manifest": Input("run/step_000013/manifest.json", _RUN, _STEP, _change_text),
    "nsys manifest": Input("run/step_000012/manifest.json", _RUN, ("collect",), _change_text),
    "nsys notes": Input("run/nsys/host.1.ranges.jsonl", _RUN, ("collect",), _change_notes),
    "nsys export": Input(_EXPORT, _RUN, ("collect",), garble_bytes),
    "report.json": Input("report.json", "report.json", ("diff",), _change_text),
}


def build(folder: Path) -> None:
    small = {name: _small(recording) for name, recording in _stored().items()}
    original, step_folders.recordings = step_folders.recordings, lambda: small
    try:
        sound = with_facts(build_step(folder / "sound"))
        write_result(sound, _still_pending(read_manifest(sound)))
        step = build_step(folder / "run")
        begun = build_step(folder / "run", step=13)
    finally:
        step_folders.recordings = original
    manifest = read_manifest(begun)
    write_json_atomically(begun / "manifest.json", msgspec.structs.replace(manifest, state="begun"))
    manifest = read_manifest(step)
    for worker in manifest.workers[:1]:
        promised = Artifact(
            path="actor_rank0.nsys-rep", lane="actor_rank0", tool="nsys", status="pending"
        )
        worker.artifacts.append(promised)
    write_json_atomically(step / "manifest.json", manifest)
    process = ProcessId.current()
    run = RunInfo(run_id="run", begin_ns=manifest.begin_ns, process=process, config={}, versions={})
    write_json_atomically(folder / "run" / "run.json", run)
    log = WatchLog(folder / "run")
    for number in range(12, 16):
        log(summary(number, {"rollout": 5000, "update_actor": 3000 + number}))
    nsys = folder / "run" / "nsys"
    nsys.mkdir()
    note = {
        "number": 1,
        "folder": step.name,
        "artifact": promised.path,
        "begin_ns": manifest.begin_ns,
    }
    notes = [note, {**note, "end_ns": manifest.end_ns}]
    (nsys / "host.1.ranges.jsonl").write_text("\n".join(json.dumps(line) for line in notes))
    (nsys / "host.1.1.nsys-rep").write_bytes(b"report")
    _export(nsys / "host.1.1.sqlite")
    (folder / "t.json.gz").write_bytes(traces()[0])
    (folder / "whole.json").write_bytes(traces()[0])
    report = msgspec.json.encode(open_step(sound).report())
    (folder / "report.json").write_bytes(report)


def _still_pending(manifest: Manifest) -> CaptureResult:
    """Return a result of a process that ended before its artifact was finished."""
    gone = msgspec.structs.replace(ProcessId.current(), started="0")
    worker = manifest.workers[0]
    pending = [msgspec.structs.replace(artifact, status="pending") for artifact in worker.artifacts]
    return msgspec.structs.replace(
        worker, capture_id=manifest.capture_id, process=gone, artifacts=pending
    )


def _stored() -> dict[str, Recording]:
    return msgspec.json.decode(
        gzip.decompress(step_folders.STORED.read_bytes()), type=dict[str, Recording]
    )


def _small(recording: Recording) -> Recording:
    return replace(recording, trace=_shortened(json.loads(recording.trace)).decode())


@cache
def traces() -> list[bytes]:
    """Return a real trace of each kind, with a few of its events."""
    found = [_shortened(json.loads(recording.trace)) for recording in _stored().values()]
    for path in sorted(DATA.glob("*.json*")):
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        if isinstance(content, list) or "traceEvents" in content:
            found.append(_shortened(content))
    return found


def _shortened(content: Any) -> bytes:
    """Return a trace with the same keys in the same order,
    and with events of each phase and category.
    """
    events = content if isinstance(content, list) else content["traceEvents"]
    kinds: dict[tuple[Any, Any], list[Any]] = {}
    for event in events:
        kinds.setdefault((event.get("ph"), event.get("cat")), []).append(event)
    share = max(2, EVENTS // len(kinds))
    kept = [event for group in kinds.values() for event in group[:share]]
    return json.dumps(
        kept if isinstance(content, list) else {**content, "traceEvents": kept}
    ).encode()
