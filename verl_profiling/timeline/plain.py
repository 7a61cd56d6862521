"""Reads role, rank and step of plain traces, which have no manifest.

Sources are the process names in the trace, and the file names of verl
(``<role>/[prefix_]prof_rank-<r>.json.gz``), vLLM (``rank<r>.<ns>.pt.trace.json.gz``), SGLang
(``<time>-TP-<r>[-DECODE].trace.json.gz``) and torch_npu
(``*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json``, rank in ``*_ascend_pt/profiler_info_<r>.json``).

The file name counts before folders, and inner folders before outer ones. A word counts if it is whole:
``http_8000`` has no ``tp_8000``. A ``rank`` of something else, as in ``lora_rank32``, is no rank.

Two files hold the same recording if both begin with the same events of the same process, or lie in the same
folder of torch_npu. The recording is counted once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.timeline.categories import ENGINE_ITERATION, is_on_device
from verl_profiling.timeline.databases import NO_DATABASE
from verl_profiling.timeline.npu_folders import RECORDING_SUFFIX, not_analysed, npu_files
from verl_profiling.timeline.step import (
    GRAPH_CAPTURE,
    TIMELINE_MARK,
    TIMELINE_NAME,
    Source,
    StepInputs,
    short_label,
    sorted_sources,
)
from verl_profiling.timeline.trace import NO_TRACE, UNDECODABLE, Blocks, Event, Limits, Trace
from verl_profiling.units import duration

_HEAD_BYTES = 1 << 14  # process names, if any, are at the beginning
_MAX_RANK = 1 << 30
_OTHER_BYTES = 64 << 20
_MERGED = "is a timeline written by merge; give the original traces"
_SAME_EVENTS = 8  # times have a resolution of 1 ns: no two recordings begin with as many equal events
_APART_NS = 1_000_000_000  # ranks begin to record within milliseconds of each other

_WORD = r"(?<![a-z0-9])"
_OTHER_RANKS = "".join(rf"(?<!{of}[_-])" for of in ("lora", "node", "local", "tp", "pp", "dp", "cp", "ep"))
_NUMBER = r"[\[_-]?(\d{1,9})"
_STEP = re.compile(f"{_WORD}(?:step|iter(?:ation)?){_NUMBER}", re.IGNORECASE)  # torchtitan: iteration_10
_RANK = re.compile(f"{_WORD}{_OTHER_RANKS}rank{_NUMBER}", re.IGNORECASE)
_TENSOR_RANK = re.compile(f"{_WORD}(?:tp|local)(?:[_-]?rank)?{_NUMBER}", re.IGNORECASE)
_DATA_RANK = re.compile(f"{_WORD}dp(?:[_-]?rank)?{_NUMBER}", re.IGNORECASE)
_REPLICA = re.compile(f"{_WORD}(?:rollout|replica){_NUMBER}", re.IGNORECASE)
_ROLE = re.compile(
    f"{_WORD}(actor|critic|ref|reward|rm|teacher|value|policy|rollout|controller)(?![a-z])", re.IGNORECASE
)
_LAST_NUMBER = re.compile(r"(\d{1,5})(?=\D*$)")
_ENGINE_PROCESS = re.compile(r"VLLM::|sglang::", re.IGNORECASE)
_MERGED_PID = re.compile(r"^\[[\w-]+\] ")  # of SGLang's ``merge_profiles``: "[TP00-DP01] 4711"
# Folders of vLLM and SGLang for the capture of graphs, and the annotation in their traces
_GRAPH_FOLDER = re.compile(r"capture_traces|graph_capture")
_GRAPH_ANNOTATION = re.compile(r"capture_(?:graph|\d+)_\w+$")
_NPU_RANK = re.compile(r"profiler_info_(\d+)\.json")
_TRACE_SUFFIX = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")
_NOT_A_TRACE = {"report.json", "run.json", "manifest.json", TIMELINE_NAME}


_Process = tuple[str, str, str]  # host, name, id of a process; empty if unknown


class _PlainTrace(Source, frozen=True, kw_only=True):
    """A trace without a manifest; lanes and workers are named once all traces are known.

    Attributes:
        process: Process of the trace.
        name: Path of the trace, relative to the folder of the capture.
        recording: Value that is equal in files with the same recording.
        is_ranked: Whether the trace or its name says the rank.
        is_merged: Whether the trace holds those of several processes.
    """

    process: _Process
    name: str
    recording: tuple[object, ...]
    is_ranked: bool
    is_merged: bool

    @property
    def file(self) -> Path:
        """The file to open. Folders of data sets have links into a cache, which are followed."""
        return self.path.resolve()


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
    traces: dict[tuple[Path, int], _PlainTrace] = {}
    damaged: list[TraceFormatError] = []
    for path in paths:
        unread = [TraceFormatError(*recording) for recording in not_analysed(path)]
        damaged += unread
        found = len(unread)
        for file in _files(path):
            try:
                name = os.path.relpath(file.absolute(), directory.absolute())
                for number, trace in enumerate(_described(file, name)):
                    traces[file.resolve(), number] = trace
            except TraceFormatError as error:
                if path == file:
                    raise
                if error.problem == _MERGED or (error.problem == NO_TRACE and _is_other_json(file)):
                    continue
                if file.suffix == ".sqlite" and error.problem.startswith(NO_DATABASE):
                    continue
                damaged.append(TraceFormatError(file, error.problem))
            found += 1
        if not found:
            raise TraceFormatError(path, "holds no manifest.json, no step folders and no trace files")
    together = len(paths) > 1 and not any(path.is_dir() for path in paths)
    return list(_steps(directory, _label(paths, directory), list(traces.values()), together)), damaged


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the traces and databases below a folder, without hidden files and results."""
    if not path.is_dir():
        yield path
        return
    kinds = (path.rglob(kind) for kind in ("*.json", "*.json.gz", "*.sqlite"))
    for file in sorted({*chain(*kinds), *npu_files(path)}):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.name not in _NOT_A_TRACE and not hidden and not file.is_dir():
            yield file


def _is_other_json(path: Path) -> bool:
    """Return whether a file that is no trace holds JSON: a value, or a value per line.

    Of a file of more than 64 MiB, only the first byte counts.
    """
    content = bytearray()
    try:
        for block in Blocks(path.resolve(), Limits()):
            content += block
            if len(content) > _OTHER_BYTES:
                return content.startswith(b"{")
    except TraceFormatError:
        return False
    return _is_json(content) or _is_json(content.lstrip().partition(b"\n")[0])


def _is_json(text: bytes | bytearray) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except UNDECODABLE:
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
    is_one = together and len({_number(trace.name, _STEP) for trace in traces}) > 1
    for trace in traces:
        steps.setdefault(None if is_one else _number(trace.name, _STEP), []).append(trace)
    only = traces[0].name if label and len(traces) == 1 else ""
    for step, of_step in sorted(steps.items(), key=lambda item: -1 if item[0] is None else item[0]):
        numbered = f"step_{step:06d}" if step is not None and len(traces) > 1 else ""
        once, notes = _once(of_step)
        yield StepInputs(
            directory=directory,
            step=_number(directory.absolute().name, _STEP) if step is None else step,
            files=_in_lanes(_ranked_by_number(once)),
            notes=[*notes, *_clock_notes(once)],
            name=only,
            label=".".join(filter(None, (label, numbered))),
        )


def _number(name: str, *patterns: re.Pattern[str]) -> int | None:
    """Return the number of the first pattern in the innermost part of a path that has any; else ``None``."""
    for part in reversed(Path(name).parts):
        for pattern in patterns:
            if numbers := pattern.findall(part):
                return int(numbers[-1])
    return None


def _described(path: Path, name: str) -> list[_PlainTrace]:
    """Return a trace with its role, rank and replica; a report of several processes is a trace of each.

    The processes of a report are ranked in the order of their devices.

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
    timed = (event for events in chain([head], chunks) for event in events if event.ts is not None)
    first = list(islice((event for event in timed if event.ph != "M"), _SAME_EVENTS))
    begin_ns = trace.base_ns + round((first[0].ts or 0.0) * 1000) if first else trace.base_ns
    host, title, pid = _process(trace, head)
    rank = _rank(trace, _npu_folder(path), name)
    if not host and f"_{pid}." in path.name:  # torch before 2.6, named by its tensorboard_trace_handler
        host = path.name.partition(f"_{pid}.")[0]
    if not host and rank is None:  # the same id in another folder may be a process of another host
        title = f"{path.parent} {title}"
    role = _role(trace, name, title, head)
    pid_in_parts = _MERGED_PID.sub("", pid)
    described = _PlainTrace(
        path=path,
        lane="",
        worker="",
        role=role,
        rank=rank or 0,
        replica=_number(name, _REPLICA) if role == ROLLOUT_ROLE else None,
        begin_ns=begin_ns,
        process=(host, title, pid_in_parts),
        name=name,
        recording=_recording(path, pid_in_parts, first, trace.base_ns),
        is_ranked=rank is not None,
        is_merged=bool(_MERGED_PID.match(pid)),
    )
    parts = [
        msgspec.structs.replace(
            described,
            rank=rank,
            is_ranked=True,
            pids=frozenset(pids),
            process=(host, title, str(pids[0])),
            recording=(*described.recording, rank),
        )
        for rank, pids in enumerate(trace.about("processes"))
    ]
    return parts or [described]


def _role(trace: Trace, name: str, process: str, head: list[Event]) -> str:
    """Return the innermost role in a name, else ``rollout`` for the process of an engine, else ``worker``."""
    if _GRAPH_FOLDER.search(name) or any(_GRAPH_ANNOTATION.match(event.name) for event in head):
        return GRAPH_CAPTURE
    for part in reversed(Path(name).parts):
        if named := _ROLE.search(part):
            return named[1].lower()
    is_named = bool(_ENGINE_PROCESS.search(process)) or "vllm_version" in trace.metadata
    is_engine = is_named or any(ENGINE_ITERATION.match(event.name) for event in head)
    return ROLLOUT_ROLE if is_engine else "worker"


def _recording(path: Path, pid: str, first: Iterable[Event], base_ns: int) -> tuple[object, ...]:
    """Return a value that is equal in files with the same recording, whatever their names and formats."""
    if of_npu := _npu_folder(path):
        return (of_npu,)
    events = ((event.name, base_ns + round((event.ts or 0.0) * 1000), event.dur) for event in first)
    return (pid, *events)


def _npu_folder(path: Path) -> Path | None:
    """Return the folder of torch_npu that holds a file, if any: a folder per recording."""
    return next((folder for folder in path.parents if folder.name.endswith(RECORDING_SUFFIX)), None)


def _rank(trace: Trace, folder: Path | None, name: str) -> int | None:
    """Return the rank from the trace, else from torch_npu's ``profiler_info`` file, else from the name."""
    info = trace.metadata.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if type(rank) is int and 0 <= rank <= _MAX_RANK:
        return rank
    for file in folder.glob("*.json") if folder else ():
        if named := _NPU_RANK.fullmatch(file.name):
            return int(named[1])
    return _number(name, _RANK, _TENSOR_RANK)


def _process(trace: Trace, head: list[Event]) -> _Process:
    """Return host, name and id of a trace's host process; empty if unknown."""
    host = str(trace.metadata.get("host_name", ""))
    labels = {e.pid: e.said("labels") for e in head if e.ph == "M" and e.name == "process_labels"}
    for event in head:
        is_named = event.ph == "M" and event.name == "process_name"
        if is_named and labels.get(event.pid, "CPU").upper().startswith("CPU"):
            return host, event.said("name"), str(event.pid)
    pids = (str(event.pid) for event in head if event.ph == "X" and not is_on_device(event))
    return host, "", next(pids, "")


def _once(traces: list[_PlainTrace]) -> tuple[list[_PlainTrace], list[str]]:
    """Return each recording once, by name, and a note on each file that repeats another one."""
    kept: dict[tuple[object, ...], _PlainTrace] = {}
    notes = []
    for trace in sorted(traces, key=_preferred):
        same = (trace.role, trace.rank, trace.replica, trace.recording)
        twin = kept.setdefault(same, trace)
        if twin is not trace:
            notes.append(f"{trace.name} holds the same recording as {twin.name}, which is counted once")
    return sorted(kept.values(), key=lambda trace: trace.name), notes


def _preferred(trace: _PlainTrace) -> tuple[bool, bool, int, str]:
    """Return a key that sorts the file to keep first: parts before their sum, all of an NPU, a short name."""
    return trace.is_merged, trace.path.name.startswith("msprof"), len(trace.name), trace.name


def _ranked_by_number(traces: list[_PlainTrace]) -> list[_PlainTrace]:
    """Rank processes whose names differ in one number, from 0 on: ``profile_0.json``, ``profile_1.json``."""
    series: dict[str, dict[int, _PlainTrace]] = {}
    for trace in traces:
        if not trace.is_ranked and (number := _LAST_NUMBER.search(trace.name)):
            shared = trace.name[: number.start()] + trace.name[number.end() :]
            series.setdefault(shared, {})[int(number[1])] = trace
    ranks: dict[Path, int] = {}
    for numbered in series.values():
        processes = {trace.process for trace in numbered.values()}
        if len(processes) == len(numbered) and sorted(numbered) == list(range(len(numbered))):
            ranks |= {trace.path: number for number, trace in numbered.items()}
    return [msgspec.structs.replace(trace, rank=ranks.get(trace.path, trace.rank)) for trace in traces]


def _in_lanes(traces: list[_PlainTrace]) -> list[Source]:
    """Give each process a lane of its own; a further one of the same rank gets e.g. ``actor_rank0.2``."""
    owners: dict[tuple[object, ...], list[_Process]] = {}
    result: list[Source] = []
    for trace in sorted(_by_engine(traces), key=lambda trace: (not trace.is_ranked, trace.name)):
        processes = owners.setdefault((trace.role, trace.replica, trace.rank), [])
        if trace.process not in processes:
            processes.append(trace.process)
        worker = f"{trace.role}_rank{trace.rank}" if trace.replica is None else f"{trace.role}{trace.replica}"
        lane = worker if trace.replica is None else f"{worker}_rank{trace.rank}"
        if number := processes.index(trace.process):
            lane = f"{lane}.{number + 1}"
        result.append(msgspec.structs.replace(trace, worker=worker, lane=lane))
    return sorted_sources(result)


def _by_engine(traces: list[_PlainTrace]) -> list[_PlainTrace]:
    """Return the traces with the replica of each rank of an engine whose name has none.

    Each engine counts its ranks from 0, so several processes of one rank are of several engines: of those in
    the names (``dp1``), else of the first, the second, and so on by name.
    """
    unnamed = [trace for trace in traces if trace.role == ROLLOUT_ROLE and trace.replica is None]
    processes: dict[int, dict[_Process, int]] = {}
    for trace in unnamed:
        if trace.is_ranked:
            of_rank = processes.setdefault(trace.rank, {})
            of_rank.setdefault(trace.process, len(of_rank))
    is_repeated = any(len(of_rank) > 1 for of_rank in processes.values())
    has_names = len(unnamed) < sum(trace.role == ROLLOUT_ROLE for trace in traces)
    replicas = {trace.path: 0 for trace in unnamed}
    for trace in unnamed:
        if is_repeated and trace.is_ranked and not has_names:
            named = _number(trace.name, _DATA_RANK)
            replicas[trace.path] = processes[trace.rank][trace.process] if named is None else named
    return [msgspec.structs.replace(one, replica=replicas.get(one.path, one.replica)) for one in traces]


def _clock_notes(traces: list[_PlainTrace]) -> Iterator[str]:
    """Yield a note for each role with hosts whose recordings begin more than a second apart."""
    roles: dict[str, dict[str, int]] = {}
    for trace in sorted(traces, key=lambda trace: trace.begin_ns):
        if host := trace.process[0]:
            roles.setdefault(trace.role, {}).setdefault(host, trace.begin_ns)
    for role, begins in roles.items():
        (first, first_ns), *_, (last, last_ns) = (*begins.items(), *begins.items())
        if last_ns - first_ns > _APART_NS:
            apart = duration((last_ns - first_ns) / 1e9)
            yield (
                f"{role}: recordings of {last} begin {apart} after those of {first}; "
                "without a manifest, clocks of hosts are not corrected"
            )
