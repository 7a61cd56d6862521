"""Reads role, rank and step of plain traces, which have no manifest.

Sources are the process names in the trace, and the file names of verl
(``<role>/[prefix_]prof_rank-<r>.json.gz``), vLLM (``rank<r>.<ns>.pt.trace.json.gz``), SGLang
(``<time>-TP-<r>[-DECODE].trace.json.gz``) and torch_npu
(``*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json``, rank in ``*_ascend_pt/profiler_info_<r>.json``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.categories import is_on_device
from verl_profiling.timeline.step import (
    TIMELINE_MARK,
    TIMELINE_NAME,
    Source,
    StepInputs,
    short_label,
    sorted_sources,
)
from verl_profiling.timeline.trace import NO_TRACE, UNDECODABLE, Blocks, Event, Limits, Trace

_HEAD_BYTES = 1 << 14  # process names, if any, are at the beginning
_MAX_RANK = 1 << 30
_OTHER_BYTES = 64 << 20
_MERGED = "is a timeline written by merge; give the original traces"
_STEP = re.compile(r"step[_-]?(\d+)", re.IGNORECASE)
_RANK = re.compile(r"(?:rank|TP)[_-]?(\d+)", re.IGNORECASE)
_REPLICA = re.compile(r"(?:rollout|replica)[_-]?(\d+)", re.IGNORECASE)
_ROLE = re.compile(r"(?<![a-z])(actor|critic|ref|reward|rollout|controller)(?![a-z])", re.IGNORECASE)
_ENGINE_PROCESS = re.compile(r"VLLM::|sglang::", re.IGNORECASE)
_NPU_TRACE = "trace_view.json"
_NPU_RANK = re.compile(r"profiler_info_(\d+)\.json")
_TRACE_SUFFIX = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")
_NOT_A_TRACE = {"report.json", "run.json", "manifest.json", TIMELINE_NAME}


_Process = tuple[str, str, int | str | None]  # host, name, id of a process; empty or None if unknown


class _PlainTrace(Source, frozen=True, kw_only=True):
    """A trace without a manifest.

    Attributes:
        process: Process of the trace.
        name: Path of the trace, relative to the folder of the capture.
    """

    process: _Process
    name: str


def plain_steps(paths: Sequence[Path]) -> tuple[list[StepInputs], list[TraceFormatError]]:
    """Return the traces at or below paths by the step number in their names, and the unreadable traces.

    If all paths are files, the files are one capture, independent of their names. In folders, timelines
    written by ``merge`` and files that are no traces are ignored.

    Raises:
        TraceFormatError: A path is a file other than a trace, or a folder without traces.
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
                if error.problem == _MERGED or (error.problem == NO_TRACE and _is_json(file)):
                    continue
                damaged.append(error)
            found += 1
        if not found:
            raise TraceFormatError(path, "holds no manifest.json, no step folders and no trace files")
    together = len(paths) > 1 and not any(path.is_dir() for path in paths)
    return list(_steps(directory, _label(paths, directory), list(traces.values()), together)), damaged


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the JSON files below a folder, without hidden files and results."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(found for kind in ("*.json", "*.json.gz") for found in path.rglob(kind)):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.name not in _NOT_A_TRACE and not hidden and not file.is_dir():
            yield file


def _is_json(path: Path) -> bool:
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
            step=_step(directory.absolute().name) if step is None else step,
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
    trace = Trace(path)
    if TIMELINE_MARK in trace.metadata:
        raise TraceFormatError(path, _MERGED)
    chunks = trace.chunks(_HEAD_BYTES)
    head = next(chunks, [])
    if not head and not trace.metadata:
        raise TraceFormatError(path, NO_TRACE)
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


def _rank(trace: Trace, name: str) -> int:
    """Return the rank from the trace, else from torch_npu's ``profiler_info`` file, else from the name."""
    info = trace.metadata.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if type(rank) is int and 0 <= rank <= _MAX_RANK:
        return rank
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
    """Give files of one lane, but of different processes, separate lanes, e.g. ``actor_rank0.2``."""
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
