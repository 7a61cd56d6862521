"""Reads role, rank and step of trace files that have no manifest.

They follow from the file names of verl (``<role>/[prefix_]prof_rank-<r>.json.gz``), vLLM
(``rank<r>.<ns>.pt.trace.json.gz``), SGLang (``<time>-TP-<r>[-DECODE].trace.json.gz``) and
torch_npu (``*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json``, with the rank in the name of
``*_ascend_pt/profiler_info_<r>.json``), and from the process names inside.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeAlias

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.categories import is_on_device
from verl_profiling.timeline.reader import Trace
from verl_profiling.timeline.sources import TIMELINE_NAME, Source, StepInputs, sorted_sources

__all__ = ["plain_steps"]

_HEAD_BYTES = 1 << 14  # process names, if any, are at the beginning
_STEP = re.compile(r"step[_-]?(\d+)", re.IGNORECASE)
_RANK = re.compile(r"(?:rank|TP)[_-]?(\d+)", re.IGNORECASE)
_REPLICA = re.compile(r"(?:rollout|replica)[_-]?(\d+)", re.IGNORECASE)
_ROLE = re.compile(r"(?<![a-z])(actor|critic|ref|reward|rollout|controller)(?![a-z])", re.IGNORECASE)
_ENGINE_PROCESS = re.compile(r"VLLM::|sglang::", re.IGNORECASE)
_NPU_TRACE = "trace_view.json"
_NPU_RANK = re.compile(r"profiler_info_(\d+)\.json")
_Process: TypeAlias = "tuple[str, str, int | str | None]"
_NOT_A_TRACE = {"report.json", "run.json", "manifest.json", TIMELINE_NAME}


def plain_steps(path: Path) -> list[StepInputs]:
    """Return the traces at or below ``path``, grouped by the step in their names.

    Files of a folder that are not traces are ignored.

    Raises:
        TraceFormatError: ``path`` is a file, and not a trace.
    """
    if path.is_file():
        source, _ = _describe(path, path.name)
        return [StepInputs(directory=path.parent, step=_step(path.name), sources=[source])]
    steps: dict[int | None, list[tuple[Source, _Process]]] = {}
    for file in sorted([*path.rglob("*.json"), *path.rglob("*.json.gz")]):
        if file.name in _NOT_A_TRACE:
            continue
        name = str(file.relative_to(path))
        try:
            described = _describe(file, name)
        except TraceFormatError:
            continue
        steps.setdefault(_step(name), []).append(described)
    return [
        StepInputs(directory=path, step=step, sources=_distinct(found))
        for step, found in sorted(steps.items(), key=lambda item: -1 if item[0] is None else item[0])
    ]


def _step(name: str) -> int | None:
    match = _STEP.search(name)
    return int(match[1]) if match else None


def _describe(path: Path, name: str) -> tuple[Source, _Process]:
    trace = Trace(path)
    process = _process(trace)
    engine = bool(_ENGINE_PROCESS.search(process[1])) or "vllm_version" in trace.metadata
    named_role = _ROLE.search(name)
    role = named_role[1].lower() if named_role else "rollout" if engine else "worker"
    rank = _rank(trace, name)
    replica_match = _REPLICA.search(name)
    replica = (int(replica_match[1]) if replica_match else 0) if role == "rollout" else None
    worker = f"{role}{replica}" if replica is not None else f"{role}_rank{rank}"
    lane = f"{worker}_rank{rank}" if replica is not None else worker
    source = Source(path=path, lane=lane, worker=worker, role=role, rank=rank, replica=replica)
    return source, process


def _rank(trace: Trace, name: str) -> int:
    """Return the rank from the trace, from torch_npu's file beside it, or else from its name."""
    if trace.rank is not None:
        return trace.rank
    beside = trace.path.parent.parent if trace.path.name == _NPU_TRACE else None
    told = [_NPU_RANK.fullmatch(file.name) for file in (beside.glob("*.json") if beside else ())]
    known = [match[1] for match in told if match] or _RANK.findall(name)
    return int(known[-1]) if known else 0


def _process(trace: Trace) -> _Process:
    """Return host, name and id of a trace's process, as far as the trace tells."""
    host = str(trace.metadata.get("host_name", ""))
    head = next(trace.chunks(_HEAD_BYTES), [])
    for event in head:
        if event.ph == "M" and event.name == "process_name":
            return host, event.said("name"), event.pid
    pids = (event.pid for event in head if event.ph == "X" and not is_on_device(event))
    return host, "", next(pids, None)


def _distinct(found: list[tuple[Source, _Process]]) -> list[Source]:
    """Give files that name the same lane but come from different processes separate lanes."""
    owners: dict[str, list[_Process]] = {}
    result = []
    for source, process in found:
        known = owners.setdefault(source.lane, [])
        if process not in known:
            known.append(process)
        number = known.index(process) + 1
        lane = source.lane if number == 1 else f"{source.lane}.{number}"
        result.append(msgspec.structs.replace(source, lane=lane))
    return sorted_sources(result)
