"""Places plain traces, which have no manifest, in one lane per process; finds traces of NPUs.

Several files may hold the same recording, e.g. a trace and its copy; only one of them is used. Two
files hold the same recording if both begin with the same events of the same process. They also do
if both lie in one ``*_ascend_pt`` folder, which torch_npu writes per recording. The analysis of
such a folder writes a trace, a database, or both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from msgspec.structs import replace

from verl_profiling.files.run_files import RECORDING_SUFFIX
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.steps.step import Source, sorted_sources
from verl_profiling.units import duration

WORD = r"(?<![a-z0-9])"
"""Regular expression for the begin of a word in a path."""

NUMBER = r"[\[=_-]?(\d{1,9})"
"""Regular expression for the number behind a word: ``rank3``, ``rank[3]``, ``step=3``."""

_NPU_TRACE = "trace_view.json"
_NPU_DATABASES = "ascend_pytorch_profiler*.db"
_APART_S = 1.0  # ranks begin to record within milliseconds of each other
_DATA_RANK = re.compile(f"{WORD}dp(?:[_-]?rank)?{NUMBER}", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"(\d{1,5})(?=\D*$)")

Process = tuple[str, str, str]
"""Host, name and id of a process; empty if unknown."""

_Numbers = dict[Process, int]
"""Number of each process, from 0 on in order of its first trace."""


class PlainTrace(Source, frozen=True, kw_only=True):
    """A trace without a manifest; lanes and workers are named once all traces are known.

    Attributes:
        process: Host, name and id of the recorded process.
        name: Path of the trace, relative to the folder of the capture.
        recording: Value that is equal for files with the same recording, e.g. the first events.
        is_ranked: Whether the trace or its path has the rank; else ``rank`` is 0.
        is_merged: Whether the file is one that SGLang merged from the traces of several processes.
    """

    process: Process
    name: str
    recording: tuple[object, ...]
    is_ranked: bool
    is_merged: bool

    @property
    def host_clock(self) -> str:
        """Host of the process. Without a manifest, the offset of its clock is unknown."""
        return self.process[0]

    @property
    def file(self) -> Path:
        """The file to open. Folders of data sets have links into a cache, which are followed."""
        return self.path.resolve()


def number_in(name: str, *patterns: re.Pattern[str]) -> int | None:
    """Return a number in a path, e.g. that of ``rank3``; ``None`` if no pattern fits.

    Args:
        name: The path; file names precede folders, and inner folders precede outer ones.
        patterns: Regular expressions with the number as group; the first that fits counts.
    """
    for part in reversed(Path(name).parts):
        for pattern in patterns:
            if numbers := pattern.findall(part):
                return int(numbers[-1])
    return None


def once(traces: list[PlainTrace]) -> tuple[list[PlainTrace], list[str]]:
    """Return one file of each recording, sorted by name, and a note on each file left out."""
    kept: dict[tuple[object, ...], PlainTrace] = {}
    notes = []
    for trace in sorted(traces, key=_preferred):
        same = (trace.role, trace.rank, trace.replica, trace.recording)
        twin = kept.setdefault(same, trace)
        if twin is not trace:
            notes.append(
                f"{trace.name} holds the same recording as {twin.name}, which is counted once"
            )
    return sorted(kept.values(), key=attrgetter("name")), notes


def _preferred(trace: PlainTrace) -> tuple[bool, bool, int, str]:
    """Return a sort key of a file; of files with the same recording, the first is used.

    Traces of single processes precede merged ones, other files precede ``msprof*.json``, and short
    names precede long ones.
    """
    return trace.is_merged, trace.path.name.startswith("msprof"), len(trace.name), trace.name


def ranked_by_number(traces: list[PlainTrace]) -> list[PlainTrace]:
    """Return the traces, with ranks for files whose names differ in the last number only.

    The numbers have to be 0, 1, ... without a gap, each of another process: ``profile_0.json``,
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
    return [replace(trace, rank=ranks.get(trace.path, trace.rank)) for trace in traces]


def in_lanes(traces: list[PlainTrace]) -> list[Source]:
    """Return the traces with names of lanes and workers, one lane per process.

    A second process with the same role and rank has the lane ``actor_rank0.2``.
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
        result.append(replace(trace, worker=worker, lane=lane))
    return sorted_sources(result)


def _by_engine(traces: list[PlainTrace]) -> list[PlainTrace]:
    """Return the traces; each trace of a rollout engine has a replica, also if its path has none.

    Each engine counts its ranks from 0. So if several processes have one rank, they are of several
    engines. Their replica is the number in the path (``dp1``), else their order by name.
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
            trace = replace(trace, replica=replica)
        result.append(trace)
    return result


def _lacks_replica(trace: PlainTrace) -> bool:
    return trace.role == ROLLOUT_ROLE and trace.replica is None


def clock_notes(traces: list[PlainTrace]) -> Iterator[str]:
    """Yield a note for each role whose recordings on two hosts begin more than a second apart: the
    clocks may differ.
    """
    roles: dict[str, dict[str, int]] = {}
    for trace in sorted(traces, key=attrgetter("begin_ns")):
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
    """Yield the file to read of each recording of torch_npu in a folder that torch_npu has
    analysed: the trace, else the database.
    """
    yield from sorted(folder.rglob(_NPU_TRACE))
    for database in sorted(folder.rglob(_NPU_DATABASES)):
        if not database.with_name(_NPU_TRACE).exists():
            yield database


def not_analysed(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each recording of torch_npu in a folder that is not analysed yet, and so has no trace,
    with a sentence that names the command for it.
    """
    for path, *_ in sorted(os.walk(folder)):
        if path.endswith(RECORDING_SUFFIX) and next(npu_files(Path(path)), None) is None:
            call = f"from torch_npu.profiler.profiler import analyse; analyse({path!r})"
            yield Path(path), f'is missing: torch_npu has not analysed it; run: python -c "{call}"'
