"""Places plain traces in lanes: each recording once, and each process apart; finds those of NPUs.

A recording of torch_npu is a folder ``*_ascend_pt``. Its analysis writes a trace, a database, or
both. Two files hold the same recording if both begin with the same events of the same process, or
lie in the same folder of torch_npu.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from verl_profiling.files.recording_names import RECORDING_SUFFIX
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.steps.step import Source, sorted_sources
from verl_profiling.units import duration

WORD = r"(?<![a-z0-9])"
"""Regular expression of the begin of a word in a name."""

NUMBER = r"[\[=_-]?(\d{1,9})"
"""Regular expression of the number of a word in a name: ``rank3``, ``rank[3]``, ``step=3``."""

"""End of the name of a folder of torch_npu."""

_NPU_TRACE = "trace_view.json"
_NPU_DATABASES = "ascend_pytorch_profiler*.db"
_APART_S = 1.0  # ranks begin to record within milliseconds of each other
_DATA_RANK = re.compile(f"{WORD}dp(?:[_-]?rank)?{NUMBER}", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,5})(?=\D*$)")

Process = tuple[str, str, str]
"""Host, name and id of a process; empty if unknown."""

_Numbers = dict[Process, int]
"""Numbers of processes in order, from 0 on."""


class PlainTrace(Source, frozen=True, kw_only=True):
    """A trace without a manifest; lanes and workers are named once all traces are known.

    Attributes:
        process: Process of the trace.
        name: Path of the trace, relative to the folder of the capture.
        recording: Value that is equal in files with the same recording.
        is_ranked: Whether the trace or its name says the rank.
        is_merged: Whether the trace holds those of several processes.
    """

    process: Process
    name: str
    recording: tuple[object, ...]
    is_ranked: bool
    is_merged: bool

    @property
    def host_clock(self) -> str:
        """Host of the process, whose clock no manifest compares with others."""
        return self.process[0]

    @property
    def file(self) -> Path:
        """The file to open. Folders of data sets have links into a cache, which are followed."""
        return self.path.resolve()


def number_in(name: str, *patterns: re.Pattern[str]) -> int | None:
    """Return the number of the first pattern in the innermost part of a path that has any;
    else ``None``.
    """
    for part in reversed(Path(name).parts):
        for pattern in patterns:
            if numbers := pattern.findall(part):
                return int(numbers[-1])
    return None


def once(traces: list[PlainTrace]) -> tuple[list[PlainTrace], list[str]]:
    """Return each recording once, by name, and a note on each file that repeats another one."""
    kept: dict[tuple[object, ...], PlainTrace] = {}
    notes = []
    for trace in sorted(traces, key=_preferred):
        same = (trace.role, trace.rank, trace.replica, trace.recording)
        twin = kept.setdefault(same, trace)
        if twin is not trace:
            notes.append(
                f"{trace.name} holds the same recording as {twin.name}, which is counted once"
            )
    return sorted(kept.values(), key=lambda trace: trace.name), notes


def _preferred(trace: PlainTrace) -> tuple[bool, bool, int, str]:
    """Return a key that sorts the file to keep first: parts before their sum, all of an NPU,
    a short name.
    """
    return trace.is_merged, trace.path.name.startswith("msprof"), len(trace.name), trace.name


def ranked_by_number(traces: list[PlainTrace]) -> list[PlainTrace]:
    """Rank processes whose names differ in one number, from 0 on: ``profile_0.json``,
    ``profile_1.json``.
    """
    series: dict[str, dict[int, PlainTrace]] = {}
    for trace in traces:
        if not trace.is_ranked and (number := _LAST_NUMBER.search(trace.name)):
            series.setdefault(_LAST_NUMBER.sub("", trace.name), {})[int(number[1])] = trace
    ranks: dict[Path, int] = {}
    for numbered in series.values():
        processes = {trace.process for trace in numbered.values()}
        if len(processes) == len(numbered) and sorted(numbered) == list(range(len(numbered))):
            ranks |= {trace.path: number for number, trace in numbered.items()}
    return [
        msgspec.structs.replace(trace, rank=ranks.get(trace.path, trace.rank)) for trace in traces
    ]


def in_lanes(traces: list[PlainTrace]) -> list[Source]:
    """Give each process a lane of its own; a further one of the same rank gets e.g.
    ``actor_rank0.2``.
    """
    owners: dict[tuple[object, ...], _Numbers] = {}
    result: list[Source] = []
    for trace in sorted(_by_engine(traces), key=lambda trace: (not trace.is_ranked, trace.name)):
        processes = owners.setdefault((trace.role, trace.replica, trace.rank), {})
        worker = lane = f"{trace.role}_rank{trace.rank}"
        if trace.replica is not None:
            worker = f"{trace.role}{trace.replica}"
            lane = f"{worker}_rank{trace.rank}"
        if number := processes.setdefault(trace.process, len(processes)):
            lane = f"{lane}.{number + 1}"
        result.append(msgspec.structs.replace(trace, worker=worker, lane=lane))
    return sorted_sources(result)


def _by_engine(traces: list[PlainTrace]) -> list[PlainTrace]:
    """Return the traces with the replica of each rank of an engine whose name has none.

    Each engine counts its ranks from 0, so several processes of one rank are of several engines: of
    those in the names (``dp1``), else of the first, the second, and so on by name.
    """
    ranks: dict[int, _Numbers] = {}
    for trace in traces:
        if trace.is_ranked and _lacks_replica(trace):
            processes = ranks.setdefault(trace.rank, {})
            processes.setdefault(trace.process, len(processes))
    is_repeated = any(len(processes) > 1 for processes in ranks.values())
    result = []
    for trace in traces:
        if _lacks_replica(trace):
            replica: int | None = 0
            if is_repeated and trace.is_ranked:
                named = number_in(trace.name, _DATA_RANK)
                replica = ranks[trace.rank][trace.process] if named is None else named
            trace = msgspec.structs.replace(trace, replica=replica)
        result.append(trace)
    return result


def _lacks_replica(trace: PlainTrace) -> bool:
    return trace.role == ROLLOUT_ROLE and trace.replica is None


def clock_notes(traces: list[PlainTrace]) -> Iterator[str]:
    """Yield a note for each role with hosts whose recordings begin more than a second apart."""
    roles: dict[str, dict[str, int]] = {}
    for trace in sorted(traces, key=lambda trace: trace.begin_ns):
        if host := trace.process[0]:
            roles.setdefault(trace.role, {}).setdefault(host, trace.begin_ns)
    for role, begins in roles.items():
        first, last = next(iter(begins)), next(reversed(begins))
        apart_s = (begins[last] - begins[first]) / 1e9
        if apart_s > _APART_S:
            yield (
                f"{role}: recordings of {last} begin {duration(apart_s)} after those of {first}; "
                "without a manifest, clocks of hosts are not corrected"
            )


def npu_files(folder: Path) -> Iterator[Path]:
    """Yield the file to read of each analysed recording in a folder: the trace,
    else the database.
    """
    yield from sorted(folder.rglob(_NPU_TRACE))
    for database in sorted(folder.rglob(_NPU_DATABASES)):
        if not database.with_name(_NPU_TRACE).exists():
            yield database


def not_analysed(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each recording in a folder without a file to read,
    with the command that analyses it.
    """
    for path, *_ in sorted(os.walk(folder)):
        if path.endswith(RECORDING_SUFFIX) and next(npu_files(Path(path)), None) is None:
            call = f"from torch_npu.profiler.profiler import analyse; analyse({path!r})"
            yield Path(path), f'is missing: torch_npu has not analysed it; run: python -c "{call}"'
