"""Merges the traces of one step into one timeline, in bounded memory.

The result is one Chrome trace, ``timeline.json.gz``: the controller's lanes, then the
workers' and the engines', each named and sorted. Every trace becomes one gzip member.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from isal import igzip
from msgspec.structs import replace

from verl_profiling.capture_request import parse_ranks
from verl_profiling.errors import ConfigError, TraceFormatError, choices_hint
from verl_profiling.files.opener import move_file, opened, scratch_folder, whole_file
from verl_profiling.manifest import SCHEMA_VERSION
from verl_profiling.steps.parallel_reads import results
from verl_profiling.steps.requests import requests_by_id
from verl_profiling.steps.step import (
    TIMELINE_MARK,
    TIMELINE_NAME,
    Keep,
    Source,
    StepInputs,
    zero_ns,
)
from verl_profiling.steps.trace import Event, Trace
from verl_profiling.steps.trajectory_spans import statuses_of
from verl_profiling.timeline.manifest_events import (
    CONTROLLER,
    Slice,
    controller_events,
    path_events,
    request_events,
    request_rows,
)
from verl_profiling.timeline.member import (
    Member,
    MemberJob,
    packed,
    write_events,
    write_log_member,
    write_member,
)
from verl_profiling.timeline.processes import (
    LANE_PIDS,
    REQUESTS_PID,
    STAGES_TID,
    metadata,
    name_process,
)

_LONGEST_US = 1e6  # longer events are never dropped to reduce the size


class MergeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The written timeline.

    Attributes:
        path: The timeline.
        bytes: Size of the timeline (bytes).
        events: Number of events, without metadata.
        left_out: Number of events left out by ``keep`` or ``max_bytes``.
        members: The result for each trace.
        problems: Sentences on traces, or parts of traces, that could not be merged.
    """

    path: Path
    bytes: int
    events: int
    left_out: int
    members: list[Member]
    problems: list[str]


def merge(
    inputs: StepInputs,
    output: Path | None = None,
    *,
    keep: Keep | None = None,
    max_bytes: int | None = None,
    jobs: int = 1,
    on_progress: Callable[[Source], None] | None = None,
    critical_path: Callable[[], Iterable[Slice]] = tuple,
) -> MergeResult:
    """Write the timeline of one step.

    Args:
        inputs: The step, from :func:`~verl_profiling.steps.inputs.find_steps`.
        output: File to write, uncompressed if its name ends with ``.json``; by default
            ``timeline.json.gz`` in the step's folder.
        keep: Selection of events; all by default.
        max_bytes: Drop the shortest events until the timeline is no larger than this.
        jobs: Number of processes. If ``jobs > 1`` and the caller has threads, its main module must
            be importable, because ``multiprocessing`` then starts processes with ``spawn``.
        on_progress: Called with each trace once its member is written.
        critical_path: Function that returns the critical path; after an error, only the path is
            missing.

    Raises:
        TraceFormatError: The step has no readable trace.
        OSError: The timeline cannot be written.
    """
    output = output or inputs.output(TIMELINE_NAME)
    keep = keep or Keep()
    begin_ns = min(map(attrgetter("begin_ns"), inputs.files), default=0)
    if inputs.manifest is not None:
        begin_ns = inputs.manifest.begin_ns
    base_ns = zero_ns(begin_ns)
    with scratch_folder(output) as scratch:
        while True:
            plan, pids = _plan(inputs, scratch, base_ns, keep)
            members = []
            for job, member in _run(plan, inputs.ray, jobs):
                members.append(member)
                if on_progress:
                    on_progress(job.source)
            result = _join(
                scratch / "timeline", inputs, plan, pids, members, base_ns, keep, critical_path
            )
            if output.suffix == ".json":
                result = _unpacked(result)
            if max_bytes is None or result.bytes <= max_bytes or keep.min_us >= _LONGEST_US:
                break
            fits_us = max(
                min_us_for_share(result.path, max_bytes / result.bytes), 2 * keep.min_us, 1.0
            )
            keep = replace(keep, min_us=min(fits_us, _LONGEST_US))
        move_file(result.path, output)
        return replace(result, path=output)


def _join(
    path: Path,
    inputs: StepInputs,
    plan: list[MemberJob],
    pids: dict[str, int],
    members: list[Member],
    base_ns: int,
    keep: Keep,
    critical_path: Callable[[], Iterable[Slice]],
) -> MergeResult:
    """Concatenate the controller's events, the requests and the members into one file.

    Raises:
        TraceFormatError: No member could be read, and there is no manifest.
    """
    opening = _opening(inputs, plan, pids, base_ns)
    problems = list(inputs.absent)
    events = _number_of(opening)
    left_out = 0
    is_readable = inputs.manifest is not None
    for member in members:
        problems += [f"{member.path.name}: {problem}" for problem in member.problems]
        events += member.events
        left_out += member.left_out
        is_readable |= member.is_readable
    if not is_readable:
        raise TraceFormatError(inputs.directory, "; ".join(problems) or "holds no trace to merge")
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        TIMELINE_MARK: SCHEMA_VERSION,
        "baseTimeNanoseconds": base_ns,
        "traceEvents": opening,
    }
    with whole_file(path) as timeline:
        with packed(timeline) as part:
            part.write(msgspec.json.encode(document)[:-2])
            path_slices: list[Event] = []
            try:
                path_slices = path_events(critical_path(), base_ns)
            except Exception as error:
                problems.append(f"no critical path: {type(error).__name__}: {error}")
            requests_of = (request_events(w, pids[w.name], base_ns) for w in inputs.workers)
            for drawn in chain([path_slices], requests_of):
                kept = keep.select(drawn, base_ns)
                left_out += len(drawn) - len(kept)
                events += _number_of(kept)
                write_events(kept, part)
        for job, member in zip(plan, members, strict=True):
            if member.is_readable:
                with opened(job.output) as member_file:
                    shutil.copyfileobj(member_file, timeline, 1 << 20)
                job.output.unlink()
        with packed(timeline) as end:
            end.write(b"\n]}\n")
    return MergeResult(
        path=path,
        bytes=path.stat().st_size,
        events=events,
        left_out=left_out,
        members=members,
        problems=problems,
    )


def _number_of(events: Iterable[Event]) -> int:
    """Return the number of events, without metadata."""
    return sum(event.ph != "M" for event in events)


def _unpacked(result: MergeResult) -> MergeResult:
    path = result.path.with_suffix(".json")
    with opened(result.path) as file, igzip.open(file) as content, whole_file(path) as unpacked:
        shutil.copyfileobj(content, unpacked, 1 << 20)
    return replace(result, path=path, bytes=path.stat().st_size)


def _plan(
    inputs: StepInputs, scratch: Path, base_ns: int, keep: Keep
) -> tuple[list[MemberJob], dict[str, int]]:
    """Return a job for each member, and the first process id in the timeline of each worker and of
    the controller.
    """
    lanes: dict[str, int] = {}
    pids = {CONTROLLER: LANE_PIDS}
    for source in inputs.files:
        lanes.setdefault(source.lane, (len(lanes) + 2) * LANE_PIDS)
        pids.setdefault(source.worker, lanes[source.lane])
    last = max(lanes.values(), default=LANE_PIDS)
    for number, worker in enumerate(inputs.workers, 1):
        pids.setdefault(worker.name, last + number * LANE_PIDS)
    requests = requests_by_id(inputs.workers)
    places = {}
    for worker in inputs.workers:
        for request, row in zip(worker.requests, request_rows(worker), strict=True):
            if keep.holds(request.begin_ns, request.end_ns):
                place = (pids[worker.name] + REQUESTS_PID, row + 1)
                places[request.id, request.begin_ns] = place
    statuses = statuses_of(inputs)
    uses = Counter[str]()
    plan = []
    for index, source in enumerate(inputs.files, 1):
        job = MemberJob(
            source=source,
            output=scratch / str(index),
            index=index,
            pid=lanes[source.lane],
            lane_index=uses[source.lane],
            base_ns=base_ns,
            keep=keep,
            limits=inputs.limits,
            statuses=statuses,
        )
        if source.is_log:
            job = replace(job, requests=requests, places=places)
        plan.append(job)
        uses[source.lane] += 1
    return plan, pids


def _run(plan: list[MemberJob], ray: str | None, jobs: int) -> Iterator[tuple[MemberJob, Member]]:
    """Yield the member of each log or trace; an unreadable file gets an empty member."""
    write: Callable[[MemberJob], Member | tuple[Member, bytes]] = _write
    if ray is not None:
        write = _sent
    written = results([(partial(write, job), [job.source]) for job in plan], ray, jobs)
    for job, member in zip(plan, written, strict=True):
        if isinstance(member, TraceFormatError):
            member = Member(path=job.source.path, problems=[member.problem], is_readable=False)
        elif isinstance(member, tuple):
            member, content = member
            with whole_file(job.output) as file:
                file.write(content)
        yield job, member


def _write(job: MemberJob) -> Member:
    if job.source.is_log:
        return write_log_member(job)
    return write_member(job)


def _sent(job: MemberJob) -> tuple[Member, bytes]:
    """Write a member on a host that does not have the output folder;
    return the member and its content.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder, job.output.name)
        member = _write(replace(job, output=path))
        with opened(path) as file:
            return member, file.read()


def _opening(
    inputs: StepInputs, plan: list[MemberJob], pids: dict[str, int], base_ns: int
) -> list[Event]:
    """Return the first events of the timeline: the controller's lanes and the workers' stages."""
    titles = {job.source.worker: job.source.title for job in reversed(plan)}
    events = controller_events(inputs.manifest, pids, base_ns) if inputs.manifest else []
    used = {event.pid for event in events} or {job.pid for job in plan[:1]}
    for worker, pid in pids.items():
        if pid in used:
            events += name_process(pid, titles.get(worker, worker))
            events.append(metadata("thread_sort_index", pid, STAGES_TID, {"sort_index": -1}))
    return events


def stage_windows(inputs: StepInputs, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Return the intervals (begin, end) of the controller's stages with these names, in unix ns.

    Raises:
        ConfigError: The step has no such stage.
    """
    windows = defaultdict[str, list[tuple[int, int]]](list)
    if inputs.manifest is not None:
        for stage in inputs.manifest.stages:
            windows[stage.name].append((stage.begin_ns, stage.end_ns))
    wanted: list[tuple[int, int]] = []
    for name in dict.fromkeys(names):
        if name not in windows:
            hint = "it has no stages"
            if windows:
                hint = choices_hint(name, windows)
            raise ConfigError("--stages", f"{inputs.title} has no stage {name!r}; {hint}")
        wanted += windows[name]
    return tuple(sorted(wanted))


def select_ranks(inputs: StepInputs, ranks: str) -> StepInputs:
    """Return the step with only the lanes of these ranks, e.g. ``0,8-15``.

    Ranks are numbers within the role; for a rollout engine, within the replica.

    Raises:
        ConfigError: ``ranks`` is not a list of ranks, or selects nothing.
    """
    wanted = parse_ranks(ranks, "--ranks") or frozenset()
    files = [file for file in inputs.files if file.rank in wanted]
    if not files:
        choices = sorted({file.rank for file in inputs.files})
        raise ConfigError("--ranks", f"{ranks!r} selects nothing; there are ranks {choices}")
    return replace(inputs, files=files)


def min_us_for_share(path: Path, share: float) -> float:
    """Return the power of two (us) that slices have to last, so that at most a share (0 to 1) of
    them is kept.
    """
    counts = Counter[int]()
    for event in chain.from_iterable(Trace(path).chunks()):
        if event.ph == "X":
            counts[math.frexp(event.dur or 0.0)[1]] += 1
    budget = share * counts.total()
    for exponent in sorted(counts, reverse=True):
        budget -= counts[exponent]
        if budget < 0:
            return 2.0**exponent
    return 0.0
