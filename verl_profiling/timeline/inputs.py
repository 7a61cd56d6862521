"""Finds the step folders or plain trace files under a path, and puts each trace on the controller's clock.

Role, rank and step of trace files without a manifest are read from the process names in the trace, and from
file names: of verl (``<role>/[prefix_]prof_rank-<r>.json.gz``), vLLM (``rank<r>.<ns>.pt.trace.json.gz``),
SGLang (``<time>-TP-<r>[-DECODE].trace.json.gz``) and torch_npu
(``*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json``, rank in ``*_ascend_pt/profiler_info_<r>.json``).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import safe_name
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, Artifact, CaptureResult, Manifest
from verl_profiling.run_files import known_run, named_file, read_manifest
from verl_profiling.timeline.categories import is_on_device
from verl_profiling.timeline.step import (
    TIMELINE_MARK,
    TIMELINE_NAME,
    Source,
    StepInputs,
    short_label,
    sorted_sources,
)
from verl_profiling.timeline.trace import UNDECODABLE, Blocks, Event, Limits, Trace
from verl_profiling.trajectory_log import LOG_SUFFIX, open_log
from verl_profiling.units import local_time, step_list
from verl_profiling.watch_log import has_watch_log

_HEAD_BYTES = 1 << 14  # process names, if any, are at the beginning
_OTHER_BYTES = 64 << 20
_STEP = re.compile(r"step[_-]?(\d+)", re.IGNORECASE)
_RANK = re.compile(r"(?:rank|TP)[_-]?(\d+)", re.IGNORECASE)
_REPLICA = re.compile(r"(?:rollout|replica)[_-]?(\d+)", re.IGNORECASE)
_ROLE = re.compile(r"(?<![a-z])(actor|critic|ref|reward|rollout|controller)(?![a-z])", re.IGNORECASE)
_ENGINE_PROCESS = re.compile(r"VLLM::|sglang::", re.IGNORECASE)
_NPU_TRACE = "trace_view.json"
_NPU_RANK = re.compile(r"profiler_info_(\d+)\.json")
_TRACE_SUFFIX = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$|\.jsonl\.gz$")
_NOT_A_TRACE = {"report.json", "run.json", "manifest.json", TIMELINE_NAME}


_Process = tuple[str, str, int | str | None]  # host, name, id of a process; empty or None if unknown


class _PlainTrace(Source, frozen=True, kw_only=True):
    """A trace without a manifest.

    Attributes:
        process: Its process.
        name: Its path, relative to the folder of the capture.
    """

    process: _Process
    name: str


def plain_steps(paths: Sequence[Path]) -> tuple[list[StepInputs], list[TraceFormatError]]:
    """Return the traces at or below some paths, by the step number in their names, and unreadable traces.

    If all paths are files, they are one capture, whatever their names. In folders, JSON files that are no
    traces are ignored, and so are timelines written by ``merge``.

    Raises:
        TraceFormatError: A path is a file that is no trace, or a folder without traces.
    """
    if not paths:
        return [], []
    directory, *others = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    if others:
        directory = Path(os.path.commonpath([folder.resolve() for folder in (directory, *others)]))
    traces: dict[Path, _PlainTrace] = {}
    damaged: list[TraceFormatError] = []
    for path in paths:
        found = 0
        for file in _files(path):
            try:
                name = os.path.relpath(file.absolute(), directory.absolute())
                traces[file.resolve()] = _described(file, name)
            except TraceFormatError as error:
                if path == file:
                    raise
                if _is_other_json(file):
                    continue
                damaged.append(error)
            found += 1
        if not found:
            raise TraceFormatError(path, "holds no manifest.json, no step folders and no trace files")
    together = len(paths) > 1 and not any(path.is_dir() for path in paths)
    return list(_steps(directory, _label(paths, directory), list(traces.values()), together)), damaged


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the JSON files and logs below a folder, without hidden ones."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(
        found for kind in ("*.json", "*.json.gz", f"*{LOG_SUFFIX}") for found in path.rglob(kind)
    ):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.name not in _NOT_A_TRACE and not hidden and not file.is_dir():
            yield file


def _is_other_json(path: Path) -> bool:
    """Return whether a file of at most 64 MiB is valid JSON."""
    try:
        content = b"".join(Blocks(path, Limits(content_bytes=_OTHER_BYTES)))
        msgspec.json.decode(content, type=msgspec.Raw)
    except (TraceFormatError, *UNDECODABLE):
        return False
    return True


def _label(paths: Sequence[Path], directory: Path) -> str:
    """Return the part of result names for a selection of traces; empty for a whole folder."""
    if len(paths) == 1 and paths[0].is_dir():
        return ""
    names = {os.path.relpath(path.absolute(), directory.absolute()) for path in paths}
    return short_label("+".join(_TRACE_SUFFIX.sub("", name) for name in sorted(names)))


def _steps(directory: Path, label: str, traces: list[_PlainTrace], together: bool) -> Iterator[StepInputs]:
    steps: dict[int | None, list[_PlainTrace]] = {}
    is_one = together and len({_step(trace.name) for trace in traces}) > 1
    for trace in traces:
        steps.setdefault(None if is_one else _step(trace.name), []).append(trace)
    only = traces[0].name if label and len(traces) == 1 else ""
    for step, of_step in sorted(steps.items(), key=lambda item: -1 if item[0] is None else item[0]):
        numbered = f"step_{step:06d}" if step is not None and len(traces) > 1 else ""
        yield StepInputs(
            directory=directory,
            step=step,
            files=_distinct(of_step),
            name=only,
            label=".".join(filter(None, (label, numbered))),
        )


def _step(name: str) -> int | None:
    match = _STEP.search(name)
    return int(match[1]) if match else None


def _described(path: Path, name: str) -> _PlainTrace:
    """Return a trace with its lane, role, rank and replica.

    Raises:
        TraceFormatError: The file cannot be read, or is not a trace.
    """
    if path.name.endswith(LOG_SUFFIX):
        return _described_log(path, name)
    trace = Trace(path)
    if TIMELINE_MARK in trace.metadata:
        raise TraceFormatError(path, "is a timeline that merge wrote; name the traces that it was made of")
    chunks = trace.chunks(_HEAD_BYTES)
    head = next(chunks, [])
    if not head and not trace.metadata:
        raise TraceFormatError(path, "not a Chrome trace: holds no events")
    process = _process(trace, head)
    engine = bool(_ENGINE_PROCESS.search(process[1])) or "vllm_version" in trace.metadata
    named_role = _ROLE.search(name)
    role = named_role[1].lower() if named_role else "rollout" if engine else "worker"
    rank = _rank(trace, name)
    replica_match = _REPLICA.search(name)
    replica = (int(replica_match[1]) if replica_match else 0) if role == "rollout" else None
    worker = f"{role}{replica}" if replica is not None else f"{role}_rank{rank}"
    lane = f"{worker}_rank{rank}" if replica is not None else worker
    first_us = next((e.ts for events in chain([head], chunks) for e in events if e.ts is not None), 0.0)
    return _PlainTrace(
        path=path,
        lane=lane,
        worker=worker,
        role=role,
        rank=rank,
        replica=replica,
        begin_ns=trace.base_ns + round(first_us * 1000),
        process=process,
        name=name,
    )


def _described_log(path: Path, name: str) -> _PlainTrace:
    header = open_log(path)[0]
    lane = safe_name(header.lane)
    role, _, rank = lane.rpartition("_rank")
    known = bool(role) and rank.isdecimal()
    return _PlainTrace(
        path=path,
        lane=lane,
        worker=lane,
        role=role if known else lane,
        rank=int(rank[:9]) if known else 0,
        begin_ns=header.begin_ns,
        process=("", name, None),
        name=name,
    )


def _rank(trace: Trace, name: str) -> int:
    """Return the rank from the trace, else from torch_npu's ``profiler_info`` file, else from its name."""
    if trace.rank is not None:
        return trace.rank
    beside = trace.path.parent.parent if trace.path.name == _NPU_TRACE else None
    told = [_NPU_RANK.fullmatch(file.name) for file in (beside.glob("*.json") if beside else ())]
    known = [match[1] for match in told if match] or _RANK.findall(name)
    return int(known[-1]) if known else 0


def _process(trace: Trace, head: list[Event]) -> _Process:
    """Return host, name and id of a trace's host process; empty or ``None`` if unknown."""
    host = str(trace.metadata.get("host_name", ""))
    labels = {e.pid: e.said("labels") for e in head if e.ph == "M" and e.name == "process_labels"}
    for event in head:
        is_named = event.ph == "M" and event.name == "process_name"
        if is_named and labels.get(event.pid, "CPU").upper().startswith("CPU"):
            return host, event.said("name"), event.pid
    pids = (event.pid for event in head if event.ph == "X" and not is_on_device(event))
    return host, "", next(pids, None)


def _distinct(traces: list[_PlainTrace]) -> list[Source]:
    """Give files of the same lane, but of different processes, separate lanes, e.g. ``actor_rank0.2``."""
    owners: dict[str, list[_Process]] = {}
    result: list[Source] = []
    for trace in sorted(traces, key=lambda trace: trace.name):
        known = owners.setdefault(trace.lane, [])
        if trace.process not in known:
            known.append(trace.process)
        number = known.index(trace.process) + 1
        lane = trace.lane if number == 1 else f"{trace.lane}.{number}"
        result.append(msgspec.structs.replace(trace, lane=lane))
    return sorted_sources(result)


UNWRITTEN = f"holds no {MANIFEST_NAME}: its loop ended before the capture had begun"
_TIMES = ("begin_ns", "end_ns", "unix_ns", "arrival_ns", "scheduled_ns", "first_token_ns", "last_token_ns")
_PARTS_WITH_TIMES = ("stages", "tool_spans", "requests", "artifacts", "anchors")
_STEP_FOLDER = re.compile(r"step_(\d+)(?:\.(\d+))?")


def find_steps(path: Path) -> list[StepInputs]:
    """Return the readable steps under ``path``: a step folder, a run folder, or plain traces.

    Raises:
        TraceFormatError: There is nothing to analyse, no manifest can be read, or there are several runs.
    """
    return steps_of([the_run(path)])[0]


def steps_of(paths: Sequence[Path]) -> tuple[list[StepInputs], list[TraceFormatError]]:
    """Return the readable steps of each path, and an error for each unreadable step.

    A run folder yields its own steps, not those of runs in subfolders.

    Plain traces of all paths are grouped into steps together.

    Raises:
        TraceFormatError: As for :func:`find_steps`.
    """
    steps: dict[Path, StepInputs] = {}
    damaged: list[TraceFormatError] = []
    plain: list[Path] = []
    for path in paths:
        if is_uncaptured(path):
            raise TraceFormatError(path, how_to_capture(path))
        folders = [path] if is_step(path) else step_folders(path)
        if not any(map(is_step, folders)):
            plain.append(path)
            continue
        for folder in folders:
            try:
                steps[folder.resolve()] = _from_manifest(folder)
            except TraceFormatError as error:
                damaged.append(error)
    traces, unreadable = plain_steps(plain)
    found, damaged = [*steps.values(), *traces], [*damaged, *unreadable]
    if not found:
        raise damaged[0]
    return found, damaged


def absent(path: Path) -> TraceFormatError:
    """Return the error for a missing path; for a missing step folder, it names the capture with that step."""
    if match := _STEP_FOLDER.fullmatch(path.name):
        for folder in step_folders(path.parent):
            with suppress(TraceFormatError):
                steps = read_manifest(folder).steps
                if int(match[1]) in steps:
                    return TraceFormatError(path, f"no such folder; {folder} has {step_list(steps)}")
    return TraceFormatError(path, "no such file or folder")


def is_step(folder: Path) -> bool:
    """Return whether a folder is a step folder: it has a manifest, or is a ``step_<n>`` of a run folder."""
    if (folder / MANIFEST_NAME).exists():
        return True
    of_a_run = bool(_STEP_FOLDER.fullmatch(folder.name)) and (folder.parent / RUN_NAME).exists()
    return of_a_run and folder.is_dir()


def unfinished(manifest: Manifest) -> str:
    """Return a sentence on a capture that began and has not ended; empty for a complete capture."""
    if manifest.state != "begun":
        return ""
    began = local_time(manifest.begin_ns)
    process = manifest.process
    alive = process.alive() if process is not None else None
    if alive:
        return f"running: recorded since {began} by {process}"
    state = "unfinished" if alive is None else "killed"
    return f"{state}: its capture began {began} in {process}, which has not ended it"


def the_run(path: Path, run_id: str | None = None, *, live: bool = False) -> Path:
    """Return the folder of the only run at or below a path; a path without a run is returned unchanged.

    The path of a ``run.json`` stands for the run in its folder alone, without runs in subfolders.

    Args:
        path: The path.
        run_id: Id of the run, if several are there.
        live: Prefer the only run that is not over.

    Raises:
        TraceFormatError: The path does not exist, or holds several runs, or none with this id.
    """
    if not path.exists():
        raise absent(path)
    found = {run: known_run(run) for run in runs_at(path)}
    if run_id is not None:
        found = {run: info for run, info in found.items() if info is not None and info.run_id == run_id}
        if not found:
            raise TraceFormatError(path, f"has no run {run_id!r}")
    running = [run for run, info in found.items() if live and info is not None and not info.over]
    runs = running or list(found)
    if len(runs) > 1:
        infos = [run / RUN_NAME if (run / RUN_NAME).is_file() else run for run in runs]
        named = ", ".join(f"{info} ({described(run)})" for info, run in zip(infos, runs, strict=True))
        raise TraceFormatError(path, f"holds {len(runs)} runs; name one of them: {named}")
    return runs[0]


def runs_at(path: Path) -> list[Path]:
    """Return the folders of the runs at or below a path; the path itself if there is no run."""
    if path.name == RUN_NAME and path.is_file():
        return [path.parent]
    if not path.is_dir() or is_step(path):
        return [path]
    runs = sorted(_runs_below(path))
    if (path / RUN_NAME).is_file() or step_folders(path):
        runs.insert(0, path)
    return runs or [path]


def _runs_below(path: Path) -> Iterator[Path]:
    """Yield the run folders one or two levels below a path; folders may vanish while a job runs."""
    for inside, folders, names in os.walk(path):
        depth = len(Path(inside).relative_to(path).parts)
        if depth and RUN_NAME in names:
            yield Path(inside)
        folders[:] = [] if depth == 2 else [name for name in folders if not _STEP_FOLDER.fullmatch(name)]


def described(run: Path) -> str:
    """Return a run's number of captured steps, its id, its start, and whether it is running."""
    steps = len(step_folders(run))
    count = f"{steps} step{'s' if steps != 1 else ''}" if steps else "no captured step"
    info = known_run(run)
    if info is None:
        return f"{count}, without a readable {RUN_NAME}: name a step folder"
    goes_on = ", running" if info.end_ns is None and info.process.alive() else ""
    return f"{count}, run {info.run_id}, started {local_time(info.begin_ns)}{goes_on}"


def is_uncaptured(path: Path) -> bool:
    """Return whether a path is the folder of a run that has a log of its watch, and no step folder."""
    return has_watch_log(path) and not (is_step(path) or step_folders(path))


def how_to_capture(run: Path) -> str:
    """Return that no step of a run was captured, and how one is."""
    info = known_run(run)
    ask = f"`verl-profiling trigger {shlex.quote(str(run))}`"
    if info is not None and not info.over:
        return f"No step was captured so far; {ask} asks the job for its next one."
    over = ", and the job has ended" if info is not None else ""
    return (
        f"No step was captured{over}. schedule.steps names steps beforehand, watch.trigger has what becomes "
        f"slow captured, and {ask} asks a job while it runs."
    )


def step_folders(run: Path) -> list[Path]:
    """Return the step folders of a run folder, finished or not, by step and then by recording."""
    found = []
    for child in run.iterdir() if run.is_dir() else ():
        if (match := _STEP_FOLDER.fullmatch(child.name)) and child.is_dir():
            found.append((int(match[1]), int(match[2] or 1), child))
    return [folder for _, _, folder in sorted(found)]


def located(directory: Path, artifact: Artifact) -> tuple[Path | None, Any, str]:
    """Return the path of an artifact; if it is not in the step folder ``None``, its status, and the reason.

    While the artifact is being compressed, the path is the uncompressed file's. An artifact whose path leads
    out of the step folder is ``unreadable``.
    """
    named = (named_file(directory, path) for path in (artifact.path, artifact.path.removesuffix(".gz")))
    try:
        path = next(filter(Path.exists, named), None)
    except TraceFormatError as error:
        return None, "unreadable", error.problem
    status = artifact.status if artifact.status in ("empty", "failed") else "missing"
    elsewhere = f"it is at {artifact.where}" if artifact.where else ""
    return path, status, "; ".join(filter(None, (artifact.reason, elsewhere)))


def _from_manifest(directory: Path) -> StepInputs:
    if not (directory.is_symlink() or (directory / MANIFEST_NAME).exists()):
        raise TraceFormatError(directory, UNWRITTEN)
    manifest = read_manifest(directory)
    inputs = StepInputs(
        directory=directory,
        step=manifest.step,
        manifest=_on_loop_clock(manifest),
        unfinished=unfinished(manifest),
    )
    found: list[Source] = []
    for worker in manifest.workers:
        if worker.status not in ("ok", "skipped") and not worker.artifacts:
            inputs.absent.append(f"{worker.identity}: {worker.reason or worker.status}")
        for artifact in worker.artifacts:
            if artifact.status == "skipped":
                continue
            path, status, why = located(directory, artifact)
            if path is not None:
                found += (_source(manifest, worker, artifact, file) for file in _files_in(path))
                continue
            state = "missing" if status == "failed" else status
            inputs.absent.append(f"{artifact.path} is {state}{f': {why}' if why else ''}")
    inputs.files = sorted_sources(found)
    return inputs


def _on_loop_clock(manifest: Manifest) -> Manifest:
    """Return the manifest with the times of all workers on the controller's clock."""
    workers = [_shifted(worker, manifest.offset_ns(worker.identity)) for worker in manifest.workers]
    return msgspec.structs.replace(manifest, workers=workers)


def _shifted(worker: CaptureResult, offset_ns: int) -> CaptureResult:
    """Return a worker with an offset subtracted from its times; unknown times stay 0."""
    if not offset_ns:
        return worker

    def moved(part: Any) -> Any:
        times = {name: time - offset_ns for name in _TIMES if (time := getattr(part, name, 0))}
        return msgspec.structs.replace(part, **times)

    parts = {name: list(map(moved, getattr(worker, name))) for name in _PARTS_WITH_TIMES}
    pending = [since_ns - offset_ns for since_ns in worker.pending_since_ns]
    return msgspec.structs.replace(worker, **parts, pending_since_ns=pending)


def _source(manifest: Manifest, worker: CaptureResult, artifact: Artifact, path: Path) -> Source:
    identity = worker.identity
    clock = next((c for c in manifest.clocks if c.clock_domain == identity.clock_domain), None)
    lane_rank = re.search(r"_rank(\d+)$", artifact.lane)
    return Source(
        path=path,
        lane=artifact.lane,
        worker=worker.name,
        role=identity.role,
        rank=int(lane_rank[1]) if lane_rank else identity.rank,
        replica=identity.replica,
        topology=identity.topology,
        offset_ns=manifest.offset_ns(identity),
        error_ns=clock.error_ns if clock else 0,
        stage=artifact.stage,
    )


def _files_in(path: Path) -> Iterator[Path]:
    """Yield the trace or log of an artifact; if it is a folder (torch_npu), each Chrome trace in it."""
    if path.is_dir():
        for found in sorted(path.rglob("trace_view.json")):
            yield named_file(path, str(found.relative_to(path)))
    elif path.name.endswith((".json", ".json.gz", LOG_SUFFIX)):
        yield path
