"""Verifies that every expected artifact is present, whole and not empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.process_record import RECORDS
from verl_profiling.files.run_files import never_came, read_manifest, read_run
from verl_profiling.files.trajectory_log import LOG_SUFFIX, read_log
from verl_profiling.files.watch_log import WATCH_LOG, latest_step, read_watch_log
from verl_profiling.identity import step_folder_name
from verl_profiling.manifest import (
    AS_PLANNED,
    CUT_SHORT,
    MANIFEST_NAME,
    RUN_NAME,
    Artifact,
    Manifest,
    RunInfo,
)
from verl_profiling.steps.deaths import death_in
from verl_profiling.steps.inputs import (
    UNWRITTEN,
    how_to_capture,
    is_step,
    is_uncaptured,
    located,
    on_other_host,
    source_of,
    step_folders,
    unfinished,
    why_absent,
)
from verl_profiling.steps.parallel_reads import results
from verl_profiling.steps.plain_traces import plain_steps
from verl_profiling.steps.recordings import not_analysed, npu_files
from verl_profiling.steps.step import Source
from verl_profiling.steps.trace import Trace
from verl_profiling.steps.trace_content import Blocks, Limits
from verl_profiling.units import visible_text_of

Status = Literal[
    "ok", "begun", "cut", "missing", "empty", "truncated", "unreadable", "failed", "skipped"
]


class Checked(msgspec.Struct, frozen=True):
    """The state of one artifact.

    Attributes:
        path: Path relative to the folder that was checked.
        status: Status of the artifact. ``begun`` or ``cut`` is the status of a manifest whose
            capture has not ended, or ended early.
        reason: Reason for any status but ``ok``.
        bytes: Size on disk.
        events: Number of events, for a trace.
    """

    path: str
    status: Status
    reason: str = ""
    bytes: int = 0
    events: int | None = None


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check.

    Attributes:
        directory: The checked folder or trace.
        ok: Whether every artifact is ``ok`` (or was skipped on purpose).
        artifacts: One entry per artifact.
        note: Notes on traces without a manifest. For a run that was only watched, advice on
            capturing a step.
    """

    directory: str
    ok: bool
    artifacts: list[Checked]
    note: str = ""


def check(path: Path, limits: Limits | None = None, ray: str | None = None) -> CheckResult:
    """Read every expected file of a step folder, a run folder or a folder of traces to its end.

    Args:
        path: The folder, or a trace.
        limits: Limits on reading each trace.
        ray: Address of the Ray cluster that reads the artifacts of step folders; ``None`` for this
            host.

    Raises:
        TraceFormatError: There is nothing to check.
        ToolUnavailableError: No Ray cluster runs at the address.
    """
    limits = limits or Limits()
    checked = list(_check_run(path))
    folders = step_folders(path)
    notes = []
    if is_uncaptured(path):
        notes.append(how_to_capture(path))
    if is_step(path):
        checked = list(_check_step(path, limits, ray))
    elif path.is_dir() and (folders or checked or notes):
        for folder in folders:
            for entry in _check_step(folder, limits, ray):
                checked.append(replace(entry, path=f"{folder.name}/{entry.path}"))
    elif path.is_dir():
        checked = list(_check_traces(path, limits, notes))
    elif path.exists():
        checked = [_check_file(path.name, path.resolve(), limits)]
    else:
        raise TraceFormatError(path, why_absent(path))
    ok = all(entry.status in AS_PLANNED for entry in checked)
    return visible_text_of(
        CheckResult(directory=str(path), ok=ok, artifacts=checked, note="\n".join(notes))
    )


def _check_traces(folder: Path, limits: Limits, notes: list[str]) -> Iterator[Checked]:
    """Check the traces in a folder without manifests; add notes on them to ``notes``."""
    steps, damaged = plain_steps([folder])
    files = {Path(error.path) for error in damaged}
    for step in steps:
        notes += step.notes
        files.update(map(attrgetter("path"), step.files))
    for file in sorted(filterfalse(Path.is_dir, files)):
        yield _check_file(str(file.relative_to(folder)), file.resolve(), limits)
    for recording, problem in not_analysed(folder):
        yield Checked(str(recording.relative_to(folder)), "missing", problem)


def _check_run(run: Path) -> Iterator[Checked]:
    try:
        info = read_run(run)
    except TraceFormatError as error:
        yield Checked(RUN_NAME, "unreadable", error.problem)
        return
    if info is not None:
        yield from _check_losses(run, info)
    death = death_in(run, info)
    if death is not None:
        yield Checked(RECORDS, "failed", death.sentence())
    if sentence := never_came(info):
        yield Checked(RUN_NAME, "missing", sentence)
    try:
        latest = latest_step(read_watch_log(run))
    except TraceFormatError as error:
        yield Checked(WATCH_LOG, "unreadable", error.problem)
        return
    for last in latest:
        if last.hangs:
            yield Checked(WATCH_LOG, "failed", last.hangs)


def _check_losses(run: Path, info: RunInfo) -> Iterator[Checked]:
    """Yield the steps that ``run.json`` lists, but that have no folder in the run's folder."""
    for step, why in info.not_captured.items():
        if not (run / step_folder_name(step)).exists():
            yield Checked(RUN_NAME, "missing", f"step {step} was not captured: {why}")
    for name in info.captured:
        if "/" not in name and not (run / name).exists():
            reason = (
                f"{RUN_NAME} lists this capture; its folder was removed, renamed or never uploaded"
            )
            if info.failed.get(name):
                reason += f": {info.failed[name]}"
            yield Checked(name, "missing", reason)
    if info.end_ns is None and info.over:  # killed, or its disk could not be written
        for step in info.scheduled_steps:
            name = step_folder_name(step)
            if name not in info.captured and not (run / name).exists():
                reason = (
                    f"step {step} of schedule.steps has no folder, and training did not "
                    f"end: {info.over}"
                )
                yield Checked(RUN_NAME, "missing", reason)


def _check_step(folder: Path, limits: Limits, ray: str | None) -> Iterator[Checked]:
    """Check a step folder; paths of the entries are relative to it."""
    if not (folder.is_symlink() or (folder / MANIFEST_NAME).exists()):
        yield Checked(MANIFEST_NAME, "missing", f"{folder.name} {UNWRITTEN}")
        return
    try:
        manifest = read_manifest(folder)
    except TraceFormatError as error:
        yield Checked(MANIFEST_NAME, "unreadable", error.problem)
        return
    if reason := unfinished(manifest):
        yield Checked(MANIFEST_NAME, "begun", reason)
    elif not manifest.complete:
        said = "; ".join(note for note in manifest.notes if note.startswith(CUT_SHORT))
        yield Checked(MANIFEST_NAME, "cut", said or CUT_SHORT)
    yield from _check_workers(folder, manifest, limits, ray)
    if manifest.why_nothing:
        yield Checked(MANIFEST_NAME, "empty", manifest.why_nothing)


def _check_workers(
    folder: Path, manifest: Manifest, limits: Limits, ray: str | None
) -> Iterator[Checked]:
    calls = []
    for worker in manifest.workers:
        for artifact in worker.artifacts:
            path = folder.absolute() / artifact.path  # a task has another working directory
            where = on_other_host(folder, artifact, ray)
            source = source_of(manifest, worker, artifact, path, where)
            check_it = partial(_check_artifact, folder.absolute(), source, artifact, limits)
            calls.append((check_it, [source]))
    checked = results(calls, ray)
    for worker in manifest.workers:
        for artifact, entry in zip(worker.artifacts, checked, strict=False):
            if isinstance(entry, TraceFormatError):
                yield Checked(artifact.path, "missing", entry.problem)
            else:
                yield entry
        statuses = set(map(attrgetter("status"), worker.artifacts))
        is_explained = statuses - {"ok", "pending", "skipped"}
        if worker.status not in AS_PLANNED and not is_explained:  # e.g. the worker died
            yield Checked(worker.name, worker.status, worker.reason)


def _check_artifact(folder: Path, source: Source, artifact: Artifact, limits: Limits) -> Checked:
    """Read one artifact of a step folder completely, on the host that has it."""
    name = artifact.path
    if source.where:
        folder = source.recorded_in
    if artifact.status == "skipped":
        return Checked(name, "skipped", artifact.reason)
    path, status, reason = located(folder, artifact)
    if path is None:
        return Checked(name, status, reason)
    if path.is_dir():
        return _check_folder(name, path, limits)
    content = None
    if not path.name.endswith((".json", ".json.gz", LOG_SUFFIX)):
        content = _bytes
    entry = _check_file(name, path, limits, content)
    was_incomplete = artifact.status in ("empty", "failed", "truncated")
    if was_incomplete and entry.status in ("ok", artifact.status):
        reason = artifact.reason or entry.reason
        return replace(entry, status=artifact.status, reason=reason)
    return entry


_Content = tuple[Status, str, int | None]
"""The status of a file, the reason for any status but ``ok``, and the number of events."""


def _check_file(
    name: str, path: Path, limits: Limits, content: Callable[[Path, Limits], _Content] | None = None
) -> Checked:
    """Check one file.

    Args:
        name: Path shown for the file.
        path: The file.
        limits: Limits on reading.
        content: Function that checks the content; by default that for trajectory logs or traces, by
            the suffix of the name.
    """
    read = content or (_log if name.endswith(LOG_SUFFIX) else _trace)
    try:
        size = path.stat().st_size
        status, reason, events = read(path, limits) if size else ("empty", "0 bytes", None)
    except OSError as error:  # a link to nothing
        return Checked(name, "unreadable", error.strerror or str(error))
    except TraceFormatError as error:
        return Checked(name, "unreadable", error.problem, bytes=size)
    return Checked(name, status, reason, bytes=size, events=events)


def _log(path: Path, limits: Limits) -> _Content:
    log = read_log(path, limits.reached)
    records = len([*log.trajectories, *log.spans, *log.blocks, *log.statuses, *log.counts])
    problems = "; ".join(log.problems)
    if log.damaged:
        return "unreadable", problems, records
    if log.cut:
        return "truncated", problems, records
    if records:
        return "ok", problems, records
    return "empty", "holds no records", 0


def _trace(path: Path, limits: Limits) -> _Content:
    trace = Trace(path, limits)
    spans = timeless = 0
    for events in trace.chunks():
        spans += sum(event.ph != "M" for event in events)
        timeless += sum(event.ts is None and event.ph == "X" for event in events)
    if trace.truncated:
        return "truncated", trace.warnings[-1], trace.events
    if trace.warnings:
        return "unreadable", trace.warnings[-1], trace.events
    if timeless:
        return "unreadable", f"{timeless:,} events have no time", trace.events
    if spans:
        return "ok", "", trace.events
    return "empty", "holds no events", 0


def _bytes(path: Path, limits: Limits) -> _Content:
    """Check that a file other than a trace is not empty, and its compression is whole."""
    blocks = Blocks(path, limits)
    is_empty = not sum(map(len, blocks))
    if blocks.damage:
        return "truncated", blocks.damage, None
    if is_empty:
        return "empty", "holds no bytes", None
    return "ok", "", None


def _check_folder(name: str, path: Path, limits: Limits) -> Checked:
    """Check that an artifact that is a folder has files, and readable traces."""
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if not size:
        return Checked(name, "empty", "the folder holds no data")
    for _, problem in not_analysed(path):
        return Checked(name, "missing", problem, bytes=size)
    for trace in npu_files(path):
        entry = _check_file(f"{name}/{trace.relative_to(path)}", trace, limits)
        if entry.status != "ok":
            return entry
    return Checked(name, "ok", bytes=size)
