"""The input of the analysis: files and manifest of one step, and the paths of its results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from verl_profiling.files.opener import named_file
from verl_profiling.files.run_files import recorded_folder, written_file
from verl_profiling.files.trajectory_log import LOG_SUFFIX
from verl_profiling.identity import step_folder_name
from verl_profiling.manifest import (
    MAX_NS,
    Artifact,
    CaptureResult,
    Manifest,
    Rpc,
    StageSpan,
    StepSpan,
    ToolSpan,
)
from verl_profiling.steps.trace import Event
from verl_profiling.steps.trace_content import Limits

_ROLE_ORDER = (
    "controller",
    "actor",
    "critic",
    "ref",
    "reward",
    "rollouter",
    "agent_loop",
    "rollout",
)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one lane: a trace or a trajectory log.

    Attributes:
        path: The file.
        lane: Lane of the file, e.g. ``actor_rank0``.
        worker: Name of the worker (``rollout0`` for each lane of a replica).
        role: Role of the worker.
        rank: Rank inside the role, or inside the replica.
        replica: Index of the rollout replica.
        topology: Coordinates in named parallel dimensions, e.g. ``{"tp": 1, "pp": 0}``.
        offset_ns: Clock offset: time in the file minus time on the controller's clock.
        stage: The recorded stage, in discrete mode.
        begin_ns: Begin of the first event (unix ns), for a file without a manifest.
        recorded_ns: Begin and end of the recording in the manifest (unix ns on the controller's
            clock); 0 if unknown.
        pids: Ids of the lane's processes in the file; empty for all processes.
        where: ``host:path`` of a file on another host's own file system, which a Ray task reads.
            Then ``path`` is the path that the file would have in the step folder.
        artifact: Path of the file's artifact, relative to the step folder.
        capture_id: Id of the capture to which the file belongs.
    """

    path: Path
    lane: str
    worker: str
    role: str
    rank: int = 0
    replica: int | None = None
    topology: dict[str, int] = {}
    offset_ns: int = 0
    stage: str | None = None
    begin_ns: int = 0
    recorded_ns: tuple[int, int] = (0, 0)
    pids: frozenset[int] = frozenset()
    where: str = ""
    artifact: str = ""
    capture_id: str = ""

    @property
    def host_clock(self) -> str:
        """The host with the clock of the file's times, if its offset is unknown; else ``""``."""
        return ""

    @property
    def host(self) -> str:
        """The only host that has the file; ``""`` for a file that is visible here."""
        return self.where.partition(":")[0]

    @property
    def file(self) -> Path:
        """The file to open, on its host; the uncompressed file if only that exists.

        Raises:
            TraceFormatError: This run did not record the file on its host.
        """
        if not self.where:
            return self.path
        folder = self.recorded_in
        return written_file(folder, self.artifact) or named_file(folder, self.artifact)

    @property
    def recorded_in(self) -> Path:
        """The step folder on the only host that has the file, which is this host.

        Raises:
            TraceFormatError: This run did not record the file on its host.
        """
        return recorded_folder(self.where, self.artifact, self.worker, self.capture_id)

    @property
    def is_log(self) -> bool:
        """Whether the file is a trajectory log."""
        return self.path.name.endswith(LOG_SUFFIX)

    @property
    def title(self) -> str:
        """Name of the lane in the timeline: ``actor_rank1 [tp1 pp0]``."""
        where = " ".join(f"{dimension}{index}" for dimension, index in self.topology.items())
        if where:
            return f"{self.lane} [{where}]"
        return self.lane


def sorted_sources(sources: Iterable[Source]) -> list[Source]:
    """Return sources sorted by role, replica, rank and file name."""

    def key(source: Source) -> tuple[int, str, int, int, str]:
        order = [*_ROLE_ORDER, source.role].index(source.role)
        return order, source.role, source.replica or 0, source.rank, source.path.name

    return sorted(sources, key=key)


GRAPH_CAPTURE = "graph_capture"
"""Role of traces that were recorded while an engine captured graphs. Launches run nothing then, so
such a trace shows no work of a step.
"""

TIMELINE_NAME = "timeline.json.gz"
TIMELINE_MARK = "verlProfilingTimeline"
"""Top-level JSON key of merged timelines, which traces do not have."""

_LABEL = 80  # characters


class StepInputs(msgspec.Struct, kw_only=True):
    """The files and the manifest of one step.

    Attributes:
        directory: Folder for the results.
        step: Number of the step, if known.
        manifest: The manifest, if there is one; all its times are on the controller's clock.
        capture: Manifest of the whole capture, if the capture has several steps.
        files: Traces and logs of trajectories, sorted by lane.
        absent: Sentences on artifacts and workers that are missing.
        notes: Sentences on files that were left out, and on clocks.
        limits: Limits on reading each trace.
        communication: Regular expressions of further communication kernels.
        ray: Address of the Ray cluster that reads the files; ``None`` for this host.
        unfinished: Reason why the capture has no end, e.g. that the job still runs; empty for a
            complete capture.
        name: Path of a single plain trace, shown after the step's number.
        label: Part of result names, if several steps share ``directory``, e.g. ``step_000012``.
    """

    directory: Path
    step: int | None = None
    manifest: Manifest | None = None
    capture: Manifest | None = None
    files: list[Source] = []
    absent: list[str] = []
    notes: list[str] = []
    unfinished: str = ""
    limits: Limits = Limits()
    communication: tuple[str, ...] = ()
    ray: str | None = None
    name: str = ""
    label: str = ""

    @property
    def sources(self) -> list[Source]:
        """The traces."""
        return [file for file in self.files if not file.is_log]

    @property
    def logs(self) -> list[Source]:
        """The trajectory logs."""
        return [file for file in self.files if file.is_log]

    @property
    def workers(self) -> Sequence[CaptureResult]:
        """The results of all workers; none without a manifest."""
        return self.manifest.workers if self.manifest else ()

    @property
    def title(self) -> str:
        """``step 12``, else the name of the single trace, else the name of the folder."""
        parts = [self.name]
        if self.step is not None:
            parts.insert(0, f"step {self.step}")
        return ", ".join(filter(None, parts)) or self.directory.resolve().name

    def output(self, name: str, selection: str = "") -> Path:
        """Return the path of a result of this step.

        Args:
            name: Usual file name of the result, e.g. ``timeline.json.gz``.
            selection: Label of the part of the step in the result, e.g. ``ranks_0``; empty for all.
        """
        stem, _, suffix = name.partition(".")
        return self.directory / ".".join(
            filter(None, (stem, self.label, short_label(selection), suffix))
        )


def short_label(text: str) -> str:
    """Return a text as part of a file name, with at most 80 characters;
    a hash replaces lost characters.
    """
    label = re.sub(r"[^\w.,+-]", "_", text)
    if label == text and len(label) <= _LABEL:
        return label
    from hashlib import sha256  # with OpenSSL, for the rare name that has to be cut

    digest = sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{label[: _LABEL - 9]}_{digest[:8]}"


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """A selection of events for a timeline, all by default. Names of threads are always kept.

    Attributes:
        min_us: Complete events (``ph == "X"``) shorter than this are dropped.
        windows_ns: Events outside all of these intervals (unix ns, controller's clock) are dropped;
            empty for no limit.
    """

    min_us: float = 0.0
    windows_ns: tuple[tuple[int, int], ...] = ()

    def holds(self, begin_ns: int, end_ns: int) -> bool:
        """Return whether a span (unix ns on the controller's clock) is kept."""
        took_ns = end_ns - begin_ns
        is_long = took_ns >= self.min_us * 1000
        return is_long and (not self.windows_ns or _overlaps(begin_ns, took_ns, self.windows_ns))

    def select(self, events: list[Event], base_ns: int) -> list[Event]:
        """Return the events of one trace that the selection keeps.

        Args:
            events: Events of the trace.
            base_ns: Time of the trace's ``ts == 0`` (unix ns, controller's clock).
        """
        if self.min_us:
            events = [e for e in events if e.ph != "X" or (e.dur or 0.0) >= self.min_us]
        if self.windows_ns:
            windows = [
                ((begin - base_ns) / 1000, (end - base_ns) / 1000) for begin, end in self.windows_ns
            ]
            events = [
                e for e in events if e.ph == "M" or _overlaps(e.ts or 0.0, e.dur or 0.0, windows)
            ]
        return events


def _overlaps(begin: float, took: float, windows: Iterable[tuple[float, float]]) -> bool:
    return any(begin < last and begin + took >= first for first, last in windows)


def one_by_one(inputs: StepInputs) -> list[StepInputs]:
    """Split the inputs of a capture of several steps by step; inputs of a single step are returned
    unchanged.

    A stage that crosses the end of a step is split. A request belongs to the step in which it ends.
    Work between two steps, such as validation, belongs to neither.
    """
    manifest = inputs.manifest
    if manifest is None or len(manifest.step_spans) < 2 or not _in_order(manifest.step_spans):
        return [inputs]
    *before, last = manifest.step_spans
    # The process was killed in the last step, so its end is not recorded.
    if manifest.state != "written":
        last = replace(last, end_ns=max(last.end_ns, manifest.end_ns))
        manifest = replace(manifest, step_spans=[*before, last])
    return [_of_step(inputs, manifest, index) for index in range(len(manifest.step_spans))]


def _in_order(spans: Sequence[StepSpan]) -> bool:
    """Return whether the steps do not overlap; only then can the capture be split."""
    for span, following in pairwise(spans):
        if span.step >= following.step or span.end_ns > following.begin_ns:
            return False
    return all(span.begin_ns <= span.end_ns for span in spans)


class _Window(NamedTuple):
    """The time of one step in a capture of several steps, in unix ns.

    Attributes:
        begin_ns: Begin of the step.
        end_ns: End of the step.
        since_ns: Begin of the step; for the first step 0, so that it gets all that came before.
        next_ns: Begin of the next step; for the last step, the largest time.
    """

    begin_ns: int
    end_ns: int
    since_ns: int
    next_ns: int

    def drives(self, begun: ToolSpan | Rpc) -> bool:
        """Return whether a start or stop of a tool, or an RPC, belongs to this step.

        It belongs to the last step that began before it; if there is none, to the first step.
        """
        return self.since_ns <= begun.begin_ns < self.next_ns

    def overlaps(self, artifact: Artifact) -> bool:
        """Return whether an artifact was recorded in the step, at least in part. An artifact
        without an end counts, because it may have been.
        """
        has_begun = artifact.begin_ns < self.end_ns
        return not artifact.end_ns or (has_begun and artifact.end_ns > self.begin_ns)

    def is_around(self, stage: StageSpan) -> bool:
        """Return whether a stage ran before the first step, or between this step and the next."""
        is_before = self.since_ns < stage.end_ns <= self.begin_ns
        return is_before or self.end_ns <= stage.begin_ns < self.next_ns

    def clipped(self, stages: Iterable[StageSpan]) -> list[StageSpan]:
        """Return the parts of stages in the step."""
        parts = []
        for stage in stages:
            first, last = max(stage.begin_ns, self.begin_ns), min(stage.end_ns, self.end_ns)
            if first < last or self.begin_ns <= stage.begin_ns == stage.end_ns < self.end_ns:
                parts.append(replace(stage, begin_ns=first, end_ns=last))
        return parts

    def part_of(self, worker: CaptureResult, step: int) -> CaptureResult:
        """Return the part of a worker's result in the step, e.g. the requests that ended in it."""
        requests = [r for r in worker.requests if self.begin_ns < r.end_ns <= self.end_ns]
        return replace(
            worker,
            step=step,
            stages=self.clipped(worker.stages),
            pauses=self.clipped(worker.pauses),
            tool_spans=list(filter(self.drives, worker.tool_spans)),
            requests=requests,
            artifacts=list(filter(self.overlaps, worker.artifacts)),
        )


def _of_step(inputs: StepInputs, whole: Manifest, index: int) -> StepInputs:
    span, *later = whole.step_spans[index:]
    begins_ns = [0, *map(attrgetter("begin_ns"), whole.step_spans[1:]), MAX_NS]
    window = _Window(span.begin_ns, span.end_ns, *begins_ns[index : index + 2])
    around = sorted((*whole.around_the_step, *whole.stages), key=attrgetter("begin_ns"))
    workers = [window.part_of(worker, span.step) for worker in whole.workers]
    manifest = replace(
        whole,
        step=span.step,
        steps=[span.step],
        step_spans=[span],
        policy_version=span.policy_version,
        begin_ns=span.begin_ns,
        end_ns=span.end_ns,
        complete=whole.complete or bool(later),
        stages=window.clipped(whole.stages),
        pauses=window.clipped(whole.pauses),
        around_the_step=list(filter(window.is_around, around)),
        rpcs=list(filter(window.drives, whole.rpcs)),
        workers=workers,
        metrics=span.metrics,
    )
    recorded = set()
    for worker in workers:
        for artifact in worker.artifacts:
            recorded.add((worker.name, artifact.path))
    files = []
    for file in inputs.files:
        if file.is_log or (file.worker, file.artifact) in recorded:
            files.append(file)
    return replace(
        inputs,
        step=span.step,
        manifest=manifest,
        capture=whole,
        files=files,
        label=step_folder_name(span.step),
    )


_SLACK_NS = 3_600_000_000_000  # the clock starts an hour before the step, so that no ts is negative


def zero_ns(begin_ns: int) -> int:
    """Return the unix time (ns) of ``ts == 0`` in the timeline of a step that begins
    at ``begin_ns``.
    """
    return max(begin_ns - _SLACK_NS, 0) // 1_000_000_000 * 1_000_000_000
