"""Cuts e2e traces into their stages: the files that discrete mode would have written.

An event belongs to the stage in which it begins. The marks of a stage itself always belong to it,
even if the clocks of mark and span differ slightly. Names of processes and threads are copied to
every file. Logs of trajectories are copied whole. The result is another step folder, with a manifest,
so every command works on it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import artifact_name
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    Manifest,
    StageSpan,
)
from verl_profiling.run_files import naming, write_json_atomically
from verl_profiling.timeline.event import Event
from verl_profiling.timeline.inputs import resolve_artifact
from verl_profiling.timeline.limits import Limits
from verl_profiling.timeline.member import compressor
from verl_profiling.timeline.reader import Trace
from verl_profiling.timeline.step_inputs import StepInputs
from verl_profiling.timeline.whole_files import part_of, whole_file
from verl_profiling.trajectory_log import LOG_SUFFIX

__all__ = ["SPLIT_NAME", "split_step"]

SPLIT_NAME = "split"
_ROLLOUT = "rollout"
_OPEN_FILES = 256  # a trace of more stages is read again for the next ones
_ENCODER = msgspec.json.Encoder()


def split_step(
    inputs: StepInputs,
    output: Path | None = None,
    on_progress: Callable[[Path], None] | None = None,
    on_problem: Callable[[str], object] = warnings.warn,
) -> list[Path]:
    """Write one trace per lane and outermost stage, and a manifest of them.

    The pieces of a trace that was not read whole are ``truncated`` in that manifest.

    Args:
        inputs: The step; traces recorded in discrete mode are ignored.
        output: Folder to write; by default ``split`` in the step's folder.
        on_progress: Called with each trace when it is cut.
        on_problem: Called with what could not be read, as a sentence.

    Returns:
        The files written.

    Raises:
        TraceFormatError: The step has no manifest, or no e2e trace with stages.
        OSError: The folder cannot be written.
    """
    if inputs.manifest is None:
        raise TraceFormatError(inputs.directory, "has no manifest, so there are no stages to cut at")
    output = output or inputs.directory / SPLIT_NAME
    written: list[Path] = []
    workers: list[CaptureResult] = []
    for worker in inputs.manifest.workers:
        stages = _stages(inputs.manifest, worker)
        pieces: list[Artifact] = []
        for artifact in worker.artifacts if worker.mode == "e2e" else ():
            if not (stages and artifact.path.endswith((".json", ".json.gz"))):
                continue
            try:
                path = resolve_artifact(inputs.directory, artifact)
                if path is None or not path.is_file():
                    continue
                output.mkdir(parents=True, exist_ok=True)
                found, problems = _cut(path, artifact, stages, output, inputs.limits)
            except TraceFormatError as error:
                problems = [str(error)]
            else:
                pieces += found
                if on_progress:
                    on_progress(path)
            for problem in problems:
                on_problem(problem)
        written += [output / piece.path for piece in pieces]
        logs = [artifact for artifact in worker.artifacts if artifact.path.endswith(LOG_SUFFIX)]
        if pieces or logs:
            mode = "discrete" if pieces else worker.mode
            workers.append(msgspec.structs.replace(worker, mode=mode, artifacts=[*pieces, *logs]))
    if not written:
        raise TraceFormatError(inputs.directory, "holds no e2e trace whose worker ran a stage")
    for log in inputs.logs:
        with whole_file(output / log.path.name) as file, log.path.open("rb") as content:
            shutil.copyfileobj(content, file)
        written.append(output / log.path.name)
    write_json_atomically(output / MANIFEST_NAME, msgspec.structs.replace(inputs.manifest, workers=workers))
    return written


def _stages(manifest: Manifest, worker: CaptureResult) -> list[StageSpan]:
    """Return a worker's outermost stages, on its own clock.

    An engine that marks no stage ``rollout`` is cut at the controller's, as in discrete mode.
    """
    own = [span for span in worker.stages if span.depth == 0]
    if not worker.identity.is_engine or any(span.name == _ROLLOUT for span in own):
        return own
    shift_ns = manifest.offset_ns(worker.identity)
    windows = [
        msgspec.structs.replace(span, begin_ns=span.begin_ns + shift_ns, end_ns=span.end_ns + shift_ns)
        for span in manifest.stages
        if span.name == _ROLLOUT
    ]
    return sorted(own + windows, key=lambda span: span.begin_ns)


def _cut(
    path: Path, artifact: Artifact, stages: list[StageSpan], output: Path, limits: Limits
) -> tuple[list[Artifact], list[str]]:
    """Write the pieces of one trace; return them, and what could not be read of it."""
    suffix = path.name.removeprefix(artifact.lane).removesuffix(".gz") + ".gz"
    runs: dict[str, int] = {}
    named = []
    for span in stages:
        runs[span.name] = runs.get(span.name, 0) + 1
        name = artifact_name(artifact.lane, suffix, span.name, runs[span.name])
        named.append((output / name, span, runs[span.name]))
    pieces: list[Artifact] = []
    problems: list[str] = []
    for start in range(0, len(named), _OPEN_FILES):
        trace = Trace(path, limits)
        with naming(output), ExitStack() as files:
            opened = [files.enter_context(_Piece(*one, trace)) for one in named[start : start + _OPEN_FILES]]
            for events in trace.chunks():
                for piece in opened:
                    piece.take(events, trace.base_ns)
            problems = [f"{path.name}: {warning}" for warning in trace.warnings]
            pieces += [piece.close(artifact, trace) for piece in opened]
    return pieces, problems


class _Piece:
    """The file of one stage while it is being written; gone if it is not closed."""

    def __init__(self, path: Path, span: StageSpan, occurrence: int, trace: Trace) -> None:
        self.path = path
        self.span = span
        self._occurrence = occurrence
        self._head = {k: v for k, v in trace.metadata.items() if k != "baseTimeNanoseconds"}
        self._events = 0
        self._gzip = compressor()
        self._part = part_of(path)
        self._file: BinaryIO = self._part.open("wb")

    def __enter__(self) -> _Piece:
        head = _ENCODER.encode(self._head)[:-1] + (b"," if self._head else b"")
        self._write(head + b'"traceEvents":[\n')
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def take(self, events: list[Event], base_ns: int) -> None:
        """Write the events that belong to this stage."""
        begin, end = (self.span.begin_ns - base_ns) / 1000, (self.span.end_ns - base_ns) / 1000
        own = [event for event in events if self._is_ours(event, begin, end)]
        if own:
            self._write((b",\n" if self._events else b"") + _ENCODER.encode(own)[1:-1])
            self._events += len(own)

    def close(self, artifact: Artifact, trace: Trace) -> Artifact:
        """Finish the file and return its manifest entry."""
        self._write(b'\n],"baseTimeNanoseconds":%d}\n' % trace.base_ns)
        self._file.write(self._gzip.flush())
        self._file.close()
        self._part.replace(self.path)
        cut = trace.truncated or trace.limited
        return msgspec.structs.replace(
            artifact,
            path=self.path.name,
            status="truncated" if cut else "ok",
            stage=self.span.name,
            occurrence=self._occurrence,
            begin_ns=self.span.begin_ns,
            end_ns=self.span.end_ns,
            bytes=self.path.stat().st_size,
            events=self._events,
            reason=str(trace.warnings[-1]) if cut else "",
        )

    def _is_ours(self, event: Event, begin: float, end: float) -> bool:
        if event.ph == "M" or event.ts is None:
            return True
        if begin <= event.ts < end:
            return True
        middle = event.ts + (event.dur or 0.0) / 2
        return event.name == self.span.name and begin <= middle < end

    def _write(self, data: bytes) -> None:
        self._file.write(self._gzip.compress(data))
