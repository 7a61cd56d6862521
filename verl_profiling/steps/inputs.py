"""Finds the steps under a path, and converts the times of manifests to the controller's clock.

A step is a step folder of this package with its manifest, or a set of plain traces. Plain traces
have no manifest, e.g. those that ``torch.profiler`` wrote by itself.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.opener import named_file, real_folder
from verl_profiling.files.run_files import known_run, read_manifest, written_file
from verl_profiling.files.trajectory_log import LOG_SUFFIX
from verl_profiling.files.watch_log import has_watch_log
from verl_profiling.manifest import (
    AS_PLANNED,
    MANIFEST_NAME,
    RUN_NAME,
    Artifact,
    CaptureResult,
    Manifest,
)
from verl_profiling.steps.recordings import not_analysed, npu_files
from verl_profiling.steps.step import Source, StepInputs, sorted_sources
from verl_profiling.units import listed, local_time

UNWRITTEN = f"holds no {MANIFEST_NAME}: the loop ended before the begin of the capture"
# Fields with times, and the parts of a worker's result that have such fields
_TIMES = (
    "begin_ns",
    "end_ns",
    "unix_ns",
    "arrival_ns",
    "scheduled_ns",
    "first_token_ns",
    "last_token_ns",
)
_PARTS_WITH_TIMES = ("stages", "pauses", "tool_spans", "requests", "artifacts", "anchors")
_STEP_FOLDER = re.compile(r"step_\d+(?:\.\d+)?")


def find_steps(path: Path) -> list[StepInputs]:
    """Return the readable steps under ``path``: a step folder, a run folder, or plain traces.

    Raises:
        TraceFormatError: There is nothing to analyse, no manifest can be read, or there are several
            runs.
    """
    return steps_of([the_run(path)])[0]


def steps_of(
    paths: Sequence[Path], ray: str | None = None
) -> tuple[list[StepInputs], list[TraceFormatError]]:
    """Return the readable steps of each path, and an error for each unreadable step.

    A run folder yields its own steps, but no steps of runs in subfolders. Plain traces of all paths
    are grouped into steps together.

    Args:
        paths: Step folders, run folders, traces, or folders of traces.
        ray: Address of the Ray cluster that reads the files, also files that only other hosts have;
            ``None`` for this host.

    Raises:
        TraceFormatError: As for :func:`find_steps`.
    """
    steps: dict[Path, StepInputs] = {}
    damaged: list[TraceFormatError] = []
    plain: list[Path] = []
    for path in paths:
        if is_uncaptured(path):
            raise TraceFormatError(path, how_to_capture(path))
        folders = [path] if is_step(path) else step_folders(path)
        if not any(map(is_step, folders)):
            plain.append(path)
            continue
        for folder in folders:
            try:
                steps[folder.resolve()] = _from_manifest(folder, ray)
            except TraceFormatError as error:
                damaged.append(error)
    readable = [*steps.values()]
    if plain:
        from verl_profiling.steps.plain_traces import plain_steps  # it knows all formats of traces

        traces, unreadable = plain_steps(plain)
        readable += traces
        damaged += unreadable
    if not readable:
        raise damaged[0]
    if ray is not None:  # tasks have another working directory
        for step in readable:
            step.ray = ray
            step.files = [replace(file, path=file.path.absolute()) for file in step.files]
    return readable, damaged


def is_step(folder: Path) -> bool:
    """Return whether a folder is a step folder: it has a manifest, or is named ``step_<n>`` and
    lies in a run folder.
    """
    if (folder / MANIFEST_NAME).exists():
        return True
    of_a_run = bool(_STEP_FOLDER.fullmatch(folder.name)) and (folder.parent / RUN_NAME).exists()
    return of_a_run and folder.is_dir()


def unfinished(manifest: Manifest) -> str:
    """Return a sentence on a capture that has not ended; empty for a capture that has."""
    if manifest.state != "begun":
        return ""
    began = local_time(manifest.begin_ns)
    process = manifest.process
    alive = process and process.alive()
    if alive:
        return f"running: recorded since {began} by {process}"
    state = "unfinished" if alive is None else "killed"
    return f"{state}: the capture began {began} in {process}, and has no end"


def the_run(path: Path, *, live: bool = False) -> Path:
    """Return the folder of the only run at or below a path; a path without a run is returned
    unchanged.

    The path of a ``run.json`` selects the run in its folder, without runs in subfolders; the path
    of a ``manifest.json`` selects its step.

    Args:
        path: A folder with runs, a run folder, or any other path.
        live: Whether to leave out runs that have ended, unless all have.

    Raises:
        TraceFormatError: The path does not exist, or holds several runs.
    """
    if not path.exists():
        raise TraceFormatError(path, why_absent(path, live=live))
    if path.is_dir() and not is_step(path):
        path = real_folder(path)
    runs = runs_at(path)
    if live:
        runs = list(filter(_is_running, runs)) or runs
    if len(runs) > 1:
        names = []
        for run in runs:
            info = run / RUN_NAME
            names.append(str(info if info.is_file() else run))
        raise TraceFormatError(
            path, f"holds {len(runs)} runs; choose one of them: {', '.join(names)}"
        )
    return runs[0]


def why_absent(path: Path, *, live: bool = False) -> str:
    """Return a sentence on a path that does not exist: perhaps the step was not captured.

    Args:
        path: The path.
        live: Whether a job may be about to make the folder.
    """
    run = path.parent
    if _STEP_FOLDER.fullmatch(path.name) and known_run(run) is not None:
        captured = [folder.name for folder in step_folders(run)]
        if not captured:
            return how_to_capture(run)
        return f"this step was not captured; captured are {listed(captured, 8)}"
    if live:
        return "no such folder; if the job is starting, its callback makes the folder of the run"
    return "no such file or folder"


def _is_running(run: Path) -> bool:
    info = known_run(run)
    return info is not None and not info.over


def runs_at(path: Path) -> list[Path]:
    """Return the folders of the runs at or below a path; the path itself if there is no run."""
    if path.name in (RUN_NAME, MANIFEST_NAME) and path.is_file():
        return [path.parent]
    if not path.is_dir() or is_step(path):
        return [path]
    runs = sorted(_runs_below(path), key=lambda run: numbered(str(run)))
    if (path / RUN_NAME).is_file() or step_folders(path):
        runs.insert(0, path)
    return runs or [path]


def numbered(name: str) -> str:
    """Return a key that sorts names by the numbers in them: ``run_2`` before ``run_10``."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(20), name)


def _runs_below(path: Path) -> Iterator[Path]:
    """Yield the run folders one or two levels below a path;
    a running job may remove folders meanwhile.
    """
    for inside, folders, names in os.walk(path):
        depth = len(Path(inside).relative_to(path).parts)
        if depth and RUN_NAME in names:
            yield Path(inside)
        if depth < 2:
            folders[:] = filterfalse(_STEP_FOLDER.fullmatch, folders)
        else:
            folders.clear()


def is_uncaptured(path: Path) -> bool:
    """Return whether a path is the folder of a run with a watch log, but without step folders."""
    return has_watch_log(path) and not (is_step(path) or step_folders(path))


def how_to_capture(run: Path) -> str:
    """Return a sentence that no step of a run was captured, with advice on capturing one."""
    ask = f"`verl-profiling trigger {shlex.quote(str(run))}`"
    if _is_running(run):
        return f"No step was captured so far; {ask} requests a capture of the next step."
    none = "No step was captured"
    if known_run(run) is not None:
        none += ", and the job has ended"
    return (
        f"{none}. schedule.steps lists steps beforehand, watch.trigger captures slow steps, and "
        f"{ask} requests a capture from a running job."
    )


def step_folders(run: Path) -> list[Path]:
    """Return the step folders of a run folder in order of step: ``step_000012``, then
    ``step_000012.2`` of the same step's second capture.
    """
    if not run.is_dir():
        return []
    folders = []
    for folder in run.iterdir():
        if _STEP_FOLDER.fullmatch(folder.name) and folder.is_dir():
            folders.append(folder)
    return sorted(folders, key=lambda folder: numbered(folder.name))


def located(directory: Path, artifact: Artifact) -> tuple[Path | None, Any, str]:
    """Return an artifact's path, and its status and reason if the path is ``None``.

    A missing artifact has no path. Neither has an artifact whose listed path leads out of the step
    folder; its status is ``unreadable``. For an artifact that is being compressed, the path is that
    of the uncompressed file.
    """
    try:
        path = written_file(directory, artifact.path)
    except TraceFormatError as error:
        return None, "unreadable", error.problem
    status = "missing"
    if artifact.status in ("empty", "failed"):
        status = artifact.status
    reasons = [artifact.reason]
    if artifact.where:
        reasons.append(f"the file is at {artifact.where}")
    return path, status, "; ".join(filter(None, reasons))


def on_other_host(directory: Path, artifact: Artifact, ray: str | None) -> str:
    """Return ``host:path`` of an artifact that a Ray task has to read on its host;
    ``""`` for any other.
    """
    if ray is None or located(directory, artifact)[:2] != (None, "missing"):
        return ""
    return artifact.where


def _from_manifest(directory: Path, ray: str | None) -> StepInputs:
    if not (directory.is_symlink() or (directory / MANIFEST_NAME).exists()):
        raise TraceFormatError(directory, UNWRITTEN)
    manifest = read_manifest(directory)
    workers = [_shifted(worker, manifest.offset_ns(worker.identity)) for worker in manifest.workers]
    inputs = StepInputs(
        directory=directory,
        step=manifest.step,
        manifest=replace(manifest, workers=workers),
        unfinished=unfinished(manifest),
    )
    sources: list[Source] = []
    for worker in manifest.workers:
        if worker.status not in AS_PLANNED and not worker.artifacts:
            inputs.absent.append(f"{worker.identity}: {worker.reason or worker.status}")
        for artifact in worker.artifacts:
            if artifact.status != "skipped":
                where = on_other_host(directory, artifact, ray)
                sources += _sources_of(inputs, manifest, worker, artifact, where)
    inputs.files = sorted_sources(sources)
    return inputs


def _sources_of(
    inputs: StepInputs, manifest: Manifest, worker: CaptureResult, artifact: Artifact, where: str
) -> list[Source]:
    """Return the files of an artifact; add a sentence on each missing file to ``inputs.absent``."""
    path, status, why = located(inputs.directory, artifact)
    place = inputs.directory / artifact.path if where else path
    files: list[Path] = []
    if place is not None:
        files += _files_in(place)
        inputs.absent += [f"{folder} {problem}" for folder, problem in not_analysed(place)]
    # A task reads a file on another host. But a folder of torch_npu there cannot be listed here.
    if path is None and not files and (not where or artifact.tool == "npu"):
        state = "missing" if status == "failed" else status
        inputs.absent.append(": ".join(filter(None, (f"{artifact.path} is {state}", why))))
    return [source_of(manifest, worker, artifact, file, where) for file in files]


def _shifted(worker: CaptureResult, offset_ns: int) -> CaptureResult:
    """Return a worker's result with a clock offset subtracted; unknown times stay 0."""
    if not offset_ns:
        return worker
    parts: dict[str, list[Any]] = {}
    for name in _PARTS_WITH_TIMES:
        parts[name] = []
        for part in getattr(worker, name):
            times = {}
            for field in _TIMES:
                if time_ns := getattr(part, field, 0):
                    times[field] = time_ns - offset_ns
            parts[name].append(replace(part, **times))
    pending = [since_ns - offset_ns for since_ns in worker.pending_since_ns]
    return replace(worker, **parts, pending_since_ns=pending)


def source_of(
    manifest: Manifest, worker: CaptureResult, artifact: Artifact, path: Path, where: str
) -> Source:
    """Return a file of an artifact.

    Args:
        manifest: The manifest of the capture.
        worker: The worker with the artifact.
        artifact: The artifact.
        path: The file in the step folder.
        where: ``host:path`` of a file that only its host has, else empty.
    """
    identity = worker.identity
    rank = identity.rank
    if lane_rank := re.search(r"_rank(\d+)$", artifact.lane):
        rank = int(lane_rank[1])
    offset_ns = manifest.offset_ns(identity)
    ended_ns = 0
    if artifact.end_ns:
        ended_ns = artifact.end_ns - offset_ns
    return Source(
        path=path,
        lane=artifact.lane,
        worker=worker.name,
        role=identity.role,
        rank=rank,
        replica=identity.replica,
        topology=identity.topology,
        offset_ns=offset_ns,
        recorded_ns=(artifact.begin_ns - offset_ns, ended_ns),
        stage=artifact.stage,
        where=where,
        artifact=artifact.path,
        capture_id=manifest.capture_id,
    )


def _files_in(path: Path) -> Iterator[Path]:
    """Yield the trace or trajectory log of an artifact; for a folder of torch_npu, the file of each
    recording. Other artifacts, such as memory snapshots, have no file to read.
    """
    if path.is_dir():
        for file in npu_files(path):
            yield named_file(path, str(file.relative_to(path)))
    elif path.name.endswith((".json", ".json.gz", LOG_SUFFIX)):
        yield path
