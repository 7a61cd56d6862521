"""Reads role, rank and step of plain traces, which have no manifest of this package.

Sources are the process names in the trace, and the file names of verl
(``<role>/[prefix_]prof_rank-<r>.json.gz``), vLLM (``rank<r>.<ns>.pt.trace.json.gz``), SGLang
(``<time>-TP-<r>[-DECODE].trace.json.gz``) and torch_npu
(``*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json``, rank in
``*_ascend_pt/profiler_info_<r>.json``).

A word in the file name precedes one in a folder's name, and inner folders precede outer ones. Only
whole words count: ``http_8000`` has no ``tp_8000``. A ``rank`` of something else, as in
``lora_rank32``, is no rank.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.engine_iterations import is_like_iteration
from verl_profiling.files.run_files import RECORDING_SUFFIX, rank_of_recording
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.steps.databases import NO_DATABASE
from verl_profiling.steps.kinds import is_on_device
from verl_profiling.steps.recordings import (
    NUMBER,
    WORD,
    PlainTrace,
    Process,
    clock_notes,
    in_lanes,
    not_analysed,
    npu_files,
    number_in,
    once,
    ranked_by_number,
)
from verl_profiling.steps.step import (
    GRAPH_CAPTURE,
    TIMELINE_MARK,
    TIMELINE_NAME,
    StepInputs,
    short_label,
)
from verl_profiling.steps.trace import NO_TRACE, Event, Trace
from verl_profiling.steps.trace_content import Blocks, Limits

_HEAD_BYTES = 1 << 14  # process names, if any, are at the beginning
_MAX_RANK = 1 << 30
_OTHER_BYTES = 64 << 20  # largest file that is decoded to find out whether it is JSON
_MERGED = "is a timeline written by merge; give the original traces"
# Files that begin with this many equal events hold the same recording: times are exact to 1 ns, so
# different recordings never do.
_SAME_EVENTS = 8

_OTHER_RANKS = "".join(
    rf"(?<!{of}[_-])" for of in ("lora", "node", "local", "tp", "pp", "dp", "cp", "ep")
)
_STEP = re.compile(
    f"{WORD}(?:step|iter(?:ation)?){NUMBER}", re.IGNORECASE
)  # torchtitan: iteration_10
_RANK = re.compile(f"{WORD}{_OTHER_RANKS}rank{NUMBER}", re.IGNORECASE)
_TENSOR_RANK = re.compile(f"{WORD}(?:tp|local|worker)(?:[_-]?rank)?{NUMBER}", re.IGNORECASE)
_REPLICA = re.compile(f"{WORD}(?:rollout|replica){NUMBER}", re.IGNORECASE)
_ROLE = re.compile(
    f"{WORD}(actor|critic|ref|reward|rm|teacher|value|policy|rollout|controller)(?![a-z])",
    re.IGNORECASE,
)
_ENGINE_PROCESS = re.compile(r"VLLM::|sglang::", re.IGNORECASE)
_MERGED_PID = re.compile(r"^\[[\w-]+\] ")  # of SGLang's ``merge_profiles``: "[TP00-DP01] 4711"
# Folders of vLLM and SGLang for the capture of graphs, and the annotation in their traces
_GRAPH_FOLDER = re.compile(r"capture_traces|graph_capture")
_GRAPH_ANNOTATION = re.compile(r"capture_(?:graph|\d+)_\w+$")
_TRACE_SUFFIX = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")
_NOT_A_TRACE = {"report.json", "run.json", "manifest.json", TIMELINE_NAME}


def plain_steps(paths: Sequence[Path]) -> tuple[list[StepInputs], list[TraceFormatError]]:
    """Return the traces at or below paths, grouped by the step number in their names, and an error
    for each unreadable trace.

    If all paths are files, the files are one step, independent of their names. In folders,
    timelines written by ``merge`` and files that are no traces are ignored.

    Raises:
        TraceFormatError: A path is a file other than a trace, or a folder without traces.
    """
    if not paths:
        return [], []
    directory, *others = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    if others:
        directory = Path(os.path.commonpath(list(map(Path.resolve, (directory, *others)))))
    traces: dict[tuple[Path, int], PlainTrace] = {}
    damaged: list[TraceFormatError] = []
    for path in paths:
        unread = [TraceFormatError(*recording) for recording in not_analysed(path)]
        is_empty = not unread
        for file in _files(path):
            try:
                for part in _described(file, os.path.relpath(file, directory)):
                    traces[file.resolve(), part.rank] = part
            except TraceFormatError as error:
                if path == file:
                    raise
                if _is_no_trace(file, error.problem):
                    continue
                unread.append(TraceFormatError(file, error.problem))
            is_empty = False
        if is_empty:
            raise TraceFormatError(
                path, "holds no manifest.json, no step folders and no trace files"
            )
        damaged += unread
    together = not any(map(Path.is_dir, paths))
    steps = _steps(directory, _label(paths, directory), list(traces.values()), together)
    return list(steps), damaged


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the traces and databases below a folder, without hidden files and
    without files that this package writes, e.g. ``report.json``.
    """
    if not path.is_dir():
        yield path
        return
    files = set(npu_files(path))
    for pattern in ("*.json", "*.json.gz", "*.sqlite"):
        files.update(path.rglob(pattern))
    for file in sorted(files):
        is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.name not in _NOT_A_TRACE and not is_hidden and not file.is_dir():
            yield file


def _is_no_trace(path: Path, problem: str) -> bool:
    """Return whether an unreadable file in a folder is something else than a trace, rather than a
    damaged trace.

    Args:
        path: The file.
        problem: Reason why it was not read as a trace.
    """
    if path.suffix == ".sqlite" and problem.startswith(NO_DATABASE):
        return True
    return problem == _MERGED or (problem == NO_TRACE and _is_other_json(path))


def _is_other_json(path: Path) -> bool:
    """Return whether a file holds JSON: one value, or a value per line.

    A file of more than 64 MiB only has to begin like JSON.
    """
    content = bytearray()
    try:
        for block in Blocks(path.resolve(), Limits()):
            content += block
            if len(content) > _OTHER_BYTES:
                return content.startswith((b"{", b"["))
    except TraceFormatError:
        return False
    return _is_json(content) or _is_json(content.lstrip().partition(b"\n")[0])


def _is_json(text: bytes | bytearray) -> bool:
    """Return whether a text is JSON, also as Python writes it, with ``NaN``."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _label(paths: Sequence[Path], directory: Path) -> str:
    """Return the part of the results' file names that tells which traces were selected; empty for a
    whole folder.
    """
    if len(paths) == 1 and paths[0].is_dir():
        return ""
    names = {os.path.relpath(path, directory) for path in paths}
    return short_label("+".join(_TRACE_SUFFIX.sub("", name) for name in sorted(names)))


def _steps(
    directory: Path, label: str, traces: list[PlainTrace], together: bool
) -> Iterator[StepInputs]:
    steps: dict[int | None, list[PlainTrace]] = {}
    for trace in traces:
        steps.setdefault(number_in(trace.name, _STEP), []).append(trace)
    if together and len(steps) > 1:
        steps = {None: traces}
    name = ""
    if label and len(traces) == 1:
        name = traces[0].name
    for step in sorted(steps, key=lambda step: -1 if step is None else step):
        labels = [label]
        if step is not None and len(traces) > 1:
            labels.append(f"step_{step:06d}")
        recordings, notes = once(steps[step])
        if step is None:
            step = number_in(directory.absolute().name, _STEP)
        yield StepInputs(
            directory=directory,
            step=step,
            files=in_lanes(ranked_by_number(recordings)),
            notes=[*notes, *clock_notes(recordings)],
            name=name,
            label=".".join(filter(None, labels)),
        )


def _described(path: Path, name: str) -> list[PlainTrace]:
    """Return a trace with its role, rank and replica.

    A report of Nsight Systems may hold several processes. Each of them is returned as a trace, and
    they are ranked in the order of their devices.

    Raises:
        TraceFormatError: The file cannot be read, or is not a trace.
    """
    trace = Trace(path.resolve())
    if TIMELINE_MARK in trace.metadata:
        raise TraceFormatError(path, _MERGED)
    chunks = trace.chunks(_HEAD_BYTES)
    head = next(chunks, [])
    if not head and not trace.metadata:
        raise TraceFormatError(path, NO_TRACE)
    folder = _npu_folder(path)
    rank = _rank(trace, folder, name)
    host, title, pid = _process(trace, head, path, is_ranked=rank is not None)
    role = _role(trace, name, title, head)
    replica = None
    if role == ROLLOUT_ROLE:
        replica = number_in(name, _REPLICA)
    events = chain(head, chain.from_iterable(chunks))
    timed = (event for event in events if event.ts is not None and event.ph != "M")
    first = []
    for event in islice(timed, _SAME_EVENTS):
        first.append((event.name, trace.base_ns + round((event.ts or 0.0) * 1000), event.dur))
    pid_in_part = _MERGED_PID.sub("", pid)
    described = PlainTrace(
        path=path,
        lane="",
        worker="",
        role=role,
        rank=rank or 0,
        replica=replica,
        begin_ns=first[0][1] if first else trace.base_ns,
        process=(host, title, pid_in_part),
        name=name,
        recording=(folder or path,) if folder or not first else (pid_in_part, *first),
        is_ranked=rank is not None,
        is_merged=pid_in_part != pid,
    )
    return list(_processes(described, trace.about("processes"))) or [described]


def _processes(report: PlainTrace, listed: list[Any]) -> Iterator[PlainTrace]:
    """Yield a trace for each process of a report of Nsight Systems.

    Args:
        report: The report as one trace.
        listed: Ids of each process and of its devices, from the header; empty for one process.
    """
    host, title, _ = report.process
    try:
        processes = msgspec.convert(listed, list[list[int]])
    except msgspec.ValidationError as error:
        raise TraceFormatError(
            report.path, f"lists no processes in its header ({error})"
        ) from error
    for rank, pids in enumerate(processes):
        yield msgspec.structs.replace(
            report,
            rank=rank,
            is_ranked=True,
            pids=frozenset(pids),
            process=(host, title, str(pids)),
            recording=(*report.recording, rank),
        )


def _role(trace: Trace, name: str, process: str, head: list[Event]) -> str:
    """Return the role of a trace.

    It is the innermost role in the path; without one, ``rollout`` for the process of an engine, and
    ``worker`` for any other. Traces that an engine recorded while it captured graphs have a role of
    their own.

    Args:
        trace: The trace.
        name: Path of the trace, relative to the folder of the capture.
        process: Name of its process.
        head: The first events.
    """
    names = list(map(attrgetter("name"), head))
    if _GRAPH_FOLDER.search(name) or any(map(_GRAPH_ANNOTATION.match, names)):
        return GRAPH_CAPTURE
    for part in reversed(Path(name).parts):
        if named := _ROLE.search(part):
            return named[1].lower()
    is_named = bool(_ENGINE_PROCESS.search(process)) or "vllm_version" in trace.metadata
    if is_named or any(map(is_like_iteration, names)):
        return ROLLOUT_ROLE
    return "worker"


def _npu_folder(path: Path) -> Path | None:
    """Return the ``*_ascend_pt`` folder that holds a file, or ``None``; it has one recording."""
    for folder in path.parents:
        if folder.name.endswith(RECORDING_SUFFIX):
            return folder
    return None


def _rank(trace: Trace, folder: Path | None, name: str) -> int | None:
    """Return the rank from the header of a trace, else from torch_npu's ``profiler_info`` file,
    else from the path.
    """
    info = trace.metadata.get("distributedInfo")
    if isinstance(info, dict):
        rank = info.get("rank")
        if type(rank) is int and 0 <= rank <= _MAX_RANK:
            return rank
    if folder is not None:
        rank = rank_of_recording(folder)
        if rank is not None:
            return rank
    return number_in(name, _RANK, _TENSOR_RANK)


def _process(trace: Trace, head: list[Event], path: Path, *, is_ranked: bool) -> Process:
    """Return host, name and id of a trace's host process; empty if unknown.

    torch before 2.6 writes no host, but its ``tensorboard_trace_handler`` names the file by it.
    Without host and rank, equal ids in two folders may be of different processes. So the name then
    includes the folder.
    """
    host = str(trace.metadata.get("host_name", ""))
    name, pid = _named_process(head)
    if not host and f"_{pid}." in path.name:
        host = path.name.partition(f"_{pid}.")[0]
    if not host and not is_ranked:
        name = f"{path.parent} {name}"
    return host, name, pid


def _named_process(head: list[Event]) -> tuple[str, str]:
    """Return name and id of the first named process on the host; without names, an empty name and
    the id of the first process with an event of the host.
    """
    labels = {e.pid: e.said("labels") for e in head if e.ph == "M" and e.name == "process_labels"}
    for event in head:
        is_named = event.ph == "M" and event.name == "process_name"
        if is_named and labels.get(event.pid, "CPU").upper().startswith("CPU"):
            return event.said("name"), str(event.pid)
    pids = (str(event.pid) for event in head if event.ph == "X" and not is_on_device(event))
    return "", next(pids, "")
