"""Processes, threads and rows of the timeline: ids, names, and events from the manifest.

Events from the manifest are stages and calls of the loop, stages of workers, requests of engines,
and arrows. Hundreds of requests may overlap, so the requests of an engine are a process of their
own. Arrows lead from the ``generate`` spans of trajectories to their requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import msgspec

from verl_profiling.manifest import (
    CaptureResult,
    Manifest,
    Request,
    Rpc,
    StageSpan,
    StepSpan,
    ToolSpan,
)
from verl_profiling.steps.kinds import is_host, is_on_device
from verl_profiling.steps.nesting import packed_rows, stages_by_row
from verl_profiling.steps.trace import NO_ARGS, Event
from verl_profiling.units import _NAME_LENGTH, shortened

LANE_PIDS = 10_000
"""Number of process ids reserved for a lane."""

REQUESTS_PID = LANE_PIDS - 1
"""Offset of the process of an engine's requests among a lane's process ids."""

TRAJECTORIES_PID = LANE_PIDS - 2
"""Offset of the process of a worker's trajectories among a lane's process ids."""

STAGES_TID = 1 << 23
"""Thread id of stages in a worker's process, above the thread ids of Linux (2^22)."""

TOOL_TID = STAGES_TID + 2
"""Thread id of the starts and stops of a worker's tool."""

_PATH_PID = 1
_PROFILER_TID = STAGES_TID + 1
_PAUSES_TID = STAGES_TID + 3
_PROFILER_LANES = {"Spans", "Traces", ""}  # process ids of kineto's own events
_OVERHEAD = "overhead"  # category of kineto's own overhead, which has a process id of its own
_FIRST_DEVICE = 1
_FIRST_OTHER = 2_000
_LAST_OTHER = TRAJECTORIES_PID - 1
_OTHERS_PER_TRACE = 50
_WORDS = {"process_name": "name", "process_labels": "labels"}
_PROCESS_METADATA = {*_WORDS, "process_sort_index"}
_ENCODER = msgspec.json.Encoder()


def name_process(pid: int, name: str) -> list[Event]:
    """Return the metadata that names a process (at most 120 characters) and sorts it by its id."""
    return [
        metadata("process_name", pid, 0, {"name": shortened(name)}),
        metadata("process_sort_index", pid, 0, {"sort_index": pid}),
    ]


def name_row(pid: int, row: int, name: str) -> list[Event]:
    """Return the metadata that names and sorts a row; trajectories and requests have rows,
    not threads.
    """
    return [
        metadata("thread_name", pid, row + 1, {"name": shortened(name)}),
        metadata("thread_sort_index", pid, row + 1, {"sort_index": row}),
    ]


def metadata(kind: str, pid: int | str | None, tid: int, about: Mapping[str, object]) -> Event:
    """Return metadata of a process or thread: its name, or its place among the others."""
    return Event("M", name=kind, pid=pid, tid=tid, args=msgspec.Raw(_ENCODER.encode(about)))


def draw(
    base_ns: int,
    pid: int,
    tid: int,
    category: str,
    name: str,
    begin_ns: int,
    end_ns: int,
    about: Mapping[str, object] | None = None,
) -> Event:
    """Return a slice; a begin before the timeline is moved to the begin of the timeline.

    Args:
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
        pid: Process.
        tid: Thread, or row.
        category: Category.
        name: Name; long names are shortened.
        begin_ns: Begin (unix ns).
        end_ns: End (unix ns).
        about: Arguments of the slice.
    """
    since = begin_ns - base_ns if begin_ns > base_ns else 0
    args = NO_ARGS if about is None else msgspec.Raw(_ENCODER.encode(about))
    took = max(end_ns - base_ns - since, 0)
    return Event("X", category, shortened(name), pid, tid, since / 1000, took / 1000, args=args)


class Processes:
    """Assigns the timeline's ids to the processes of one trace.

    The host process gets the first id of the lane, like the worker's stages and the host processes
    of its other traces. Device ids follow, in order of the device numbers. Categories of events
    tell hosts from devices; a device's name includes its process label.

    Repeated metadata is kept once.

    Processes beyond the ids of a lane share the last id of the lane.

    Attributes:
        new_pids: Process ids of the timeline by the ids of the trace.
    """

    def __init__(self, pid: int, title: str, lane_index: int) -> None:
        """Start without processes.

        Args:
            pid: First process id of the lane.
            title: Title of the lane.
            lane_index: Index of the trace among the traces of the lane.
        """
        self.new_pids: dict[int | str | None, int] = {}
        self._pid = pid
        self._title = title
        self._host: int | str | None = None
        first = _FIRST_OTHER + _OTHERS_PER_TRACE * lane_index
        self._next_other = pid + min(first, _LAST_OTHER - _OTHERS_PER_TRACE)
        self._titles: dict[int, str] = {}
        self._marked = False
        self._metadata: dict[tuple[str, int | str | None, int | str | None, bytes], Event] = {}

    def find_host(self, events: list[Event]) -> None:
        """Choose the host process: the process
        with most host events among the first events of a trace.
        """
        counts = Counter(event.pid for event in events if event.ph == "X" and is_host(event))
        self._host = max(counts, key=counts.__getitem__, default=None)

    def assign(self, event: Event) -> int:
        """Return the new id for the process of an event, at the process's first event.

        Marks of Kineto itself would span all processes of the timeline, so the marks get a thread
        of the host process.
        """
        old, title = event.pid, self._title
        if old in _PROFILER_LANES:
            event.tid, event.s = _PROFILER_TID, event.s and "t"
            self._marked = True
            return self._pid
        is_device = old != self._host and is_on_device(event)
        if is_device and isinstance(old, int) and 0 <= old < _FIRST_OTHER - _FIRST_DEVICE:
            new, name = self._pid + _FIRST_DEVICE + old, f"{title} GPU {old}"
        elif self._pid not in self._titles and self._host in (None, old) and not is_device:
            new, name = self._pid, title
        else:
            new = min(self._next_other, self._pid + _LAST_OTHER)
            self._next_other += 1
            name = f"{title} {event.cat if event.cat == _OVERHEAD else old}"
            if new == self._pid + _LAST_OTHER:
                name = f"{title} … more processes"
        self.new_pids[old] = new
        self._titles[new] = name
        return new

    def note(self, event: Event) -> None:
        """Keep a metadata event, unless it is repeated."""
        arguments = bytes(event.args)  # a copy: a view would keep the whole block in memory
        key = (event.name, event.pid, event.tid, arguments)
        if key not in self._metadata:
            event.ts, event.args = None, msgspec.Raw(arguments)
            self._metadata[key] = event

    def names(self) -> list[Event]:
        """Return the metadata that names all processes with events, and their threads.

        A device's name includes its label. The names of other processes, except the host's, include
        their own names.
        """
        events: list[Event] = []
        said: dict[int, dict[str, str]] = {}
        for event in self._metadata.values():
            if (new := self.new_pids.get(event.pid)) is None:
                continue
            word = _WORDS.get(event.name, "")
            if event.name not in _PROCESS_METADATA:
                event.pid = new
                events.append(event)
            elif (word and new >= self._pid + _FIRST_OTHER) or (
                word == "labels" and new > self._pid
            ):
                said.setdefault(new, {}).setdefault(word, event.said(word)[:_NAME_LENGTH])
        if self._marked:
            self._titles.setdefault(self._pid, self._title)
            events.append(metadata("thread_name", self._pid, _PROFILER_TID, {"name": "profiler"}))
        for new, words in said.items():
            if named := " ".join(dict.fromkeys(filter(None, words.values()))):
                self._titles[new] = f"{self._title} {named}"
        for pid, title in self._titles.items():
            events += name_process(pid, title)
        return events


CONTROLLER = "controller"
_ARROW = "causes"
_FIRST_RPC_TID = 1000
_STEPS_TID = 999_998
_APART_NS = 1_000  # more than Perfetto's rounding of times (1 ns)


def controller_events(manifest: Manifest, pids: Mapping[str, int], base_ns: int) -> list[Event]:
    """Return the loop's stages and calls, the workers' stages and tools, pauses, and arrows between
    stages.

    Args:
        manifest: The capture.
        pids: Process id by the name of a worker (and of ``controller``).
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    events: list[Event] = []
    stages: list[Event] = []
    named: set[tuple[str, int]] = set()
    for (who, tid, title), category, name, span, about in _from_manifest(manifest):
        if (who, tid) not in named:
            named.add((who, tid))
            events.append(metadata("thread_name", pids[who], tid, {"name": title}))
        times = span.begin_ns, span.end_ns
        drawn = draw(base_ns, pids[who], tid, category, name, *times, about)
        (stages if category == "stage" else events).append(drawn)
    return [*events, *stages, *_arrows(stages, pids[CONTROLLER])]


Slice = tuple[str, int, int, Mapping[str, object]]
"""Name, begin, end (unix ns) and arguments of a slice."""

_Span = StepSpan | Rpc | StageSpan | ToolSpan
_Drawn = tuple[tuple[str, int, str], str, str, _Span, Mapping[str, object]]
"""Process, thread and name of the thread; category, name, times and arguments of a slice."""


def _from_manifest(manifest: Manifest) -> Iterator[_Drawn]:
    """Yield the slices of steps, calls, pauses, stages and tools,
    those of the loop before the workers'.
    """
    if len(manifest.step_spans) > 1:
        for step in manifest.step_spans:
            version = step.policy_version
            about = {} if version is None else {"policy_version": version}
            yield (CONTROLLER, _STEPS_TID, "steps"), "step", f"step {step.step}", step, about
    threads: dict[str, int] = {}
    for rpc in manifest.rpcs:
        tid = threads.setdefault(rpc.worker, _FIRST_RPC_TID + len(threads))
        called = {"worker": rpc.worker, "ok": rpc.ok}
        yield (CONTROLLER, tid, f"rpc {rpc.worker}"), "rpc", rpc.method, rpc, called
    outer_stages = [*manifest.stages, *manifest.around_the_step]
    yield from _of_process(CONTROLLER, outer_stages, manifest.pauses)
    for worker in manifest.workers:
        yield from _of_process(worker.name, worker.stages, worker.pauses)
    for worker in manifest.workers:
        for tool in worker.tool_spans:
            of_stage = {"stage": tool.stage} if tool.stage else {}
            title = f"{tool.name} of the tool"
            yield (worker.name, TOOL_TID, "tool"), "capture", title, tool, of_stage


def _of_process(
    who: str, stages: Iterable[StageSpan], pauses: Iterable[StageSpan]
) -> Iterator[_Drawn]:
    """Yield pauses and stages; stages that overlap without nesting are on separate threads."""
    for pause in pauses:
        yield (who, _PAUSES_TID, "pauses"), "pause", pause.name, pause, {}
    for span, row in stages_by_row(stages):
        title = f"stages {row + 1}" if row else "stages"
        about = {"failed": True} if span.failed else {}
        yield (who, STAGES_TID - row, title), "stage", span.name, span, about


def _arrows(stages: list[Event], controller: int) -> list[Event]:
    """Return arrows from the controller's stages to the workers' stages of the same name inside
    them.

    If several stages of the controller with this name are open, the arrow starts at the latest.

    Args:
        stages: Slices of the stages.
        controller: Process id of the controller.
    """
    arrows: list[Event] = []
    opened: dict[str, list[Event]] = {}  # by name
    for span in sorted(stages, key=lambda span: (span.ts or 0.0, span.pid != controller)):
        causes = opened.setdefault(span.name, [])
        if span.pid == controller:
            causes.append(span)
            continue
        while causes and (causes[-1].ts or 0.0) + (causes[-1].dur or 0.0) < (span.ts or 0.0):
            causes.pop()
        if causes:
            number = len(arrows) // 2 + 1
            arrows += (_end(causes[-1], "s", number), _end(span, "f", number))
    return arrows


def _end(stage: Event, phase: str, number: int) -> Event:
    bind = "e" if phase == "f" else None
    return Event(phase, "stage", _ARROW, stage.pid, stage.tid, stage.ts, id=number, bp=bind)


def path_events(path: Iterable[Slice], base_ns: int) -> list[Event]:
    """Return the slices of the critical path, in the first process.

    Args:
        path: The critical path.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    slices = [draw(base_ns, _PATH_PID, 1, "critical path", *part) for part in path]
    return [*name_process(_PATH_PID, "critical path"), *slices] if slices else []


def request_rows(worker: CaptureResult) -> list[int]:
    """Return the row of each request of an engine; requests of a row do not overlap."""
    return packed_rows([(request.begin_ns, request.end_ns) for request in worker.requests])


def request_events(worker: CaptureResult, pid: int, base_ns: int) -> list[Event]:
    """Return the slices of an engine's requests, in a process of their own.

    Args:
        worker: The engine.
        pid: First process id of the engine's lane.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    pid += REQUESTS_PID
    rows = request_rows(worker)
    events = name_process(pid, f"{worker.name} requests") if rows else []
    for row in range(max(rows, default=-1) + 1):
        events += name_row(pid, row, f"requests {row}")
    for request, row in zip(worker.requests, rows, strict=True):
        events += _slices(request, partial(draw, base_ns, pid, row + 1, "request"))
    return events


def _slices(request: Request, draw: Callable[..., Event]) -> Iterator[Event]:
    """Yield the slice of a request, and one slice per part inside it if there are several parts."""
    facts = {
        "prompt_tokens": request.prompt_tokens,
        "response_tokens": request.response_tokens,
        "failed": request.failed,
        "id": request.id or None,
        "cached_tokens": request.cached_tokens,
        "preemptions": request.preemptions,
        "policy_version": request.policy_version,
    }
    about = {name: value for name, value in facts.items() if value is not None}
    title = f"request ({request.response_tokens} tokens)"
    yield draw(title, request.begin_ns, request.end_ns, about=about)
    parts = request.parts()
    if len(parts) > 1:
        yield from (draw(*part) for part in parts)


def request_arrow(
    number: int,
    tail: tuple[int, int],
    from_ns: int,
    request: Request,
    head: tuple[int, int],
    base_ns: int,
) -> tuple[Event, Event]:
    """Return the two ends of an arrow from a span to its request.

    The head is 1 us before the request, and Perfetto attaches the head to the next slice. At the
    request's begin, Perfetto would attach the head to the first part of the request. If the tail is
    later than the request's begin (clock error), the head is 1 us after the tail.

    Args:
        number: Number of the arrow in the timeline.
        tail: Process and thread of the span.
        from_ns: Begin of the span (unix ns, controller's clock).
        request: The request.
        head: Process and thread of the request.
        base_ns: Unix nanoseconds of ``ts == 0`` in the timeline.
    """
    at_ns, inside = request.begin_ns - _APART_NS, None
    if at_ns <= from_ns:
        at_ns, inside = from_ns + _APART_NS, "e"
    start = Event("s", "request", "generate", *tail, (from_ns - base_ns) / 1000, id=number)
    end = Event("f", "request", "generate", *head, (at_ns - base_ns) / 1000, id=number, bp=inside)
    return start, end
