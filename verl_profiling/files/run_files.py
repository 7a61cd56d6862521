"""Reads and writes the files of a run. Writing is atomic, and errors have the path of the file.

Also here: what processes wrote in a hang (files in ``hangs/``, and of an ended hang in a folder of
its step there), and the names in a recording of torch_npu, which is a folder ``*_ascend_pt``.
"""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.files.opener import (
    UNDECODABLE,
    appended,
    make_folder,
    named_file,
    names_in,
    read_small,
    reading,
    whole_file,
)
from verl_profiling.manifest import (
    CUT_SHORT,
    MANIFEST_NAME,
    RUN_NAME,
    SCHEMA_VERSION,
    Artifact,
    CaptureResult,
    Manifest,
    RunInfo,
    with_artifacts,
)
from verl_profiling.units import step_list, visible_text_of, without_passwords

RESULT_SUFFIX = ".result.json"
"""Suffix of a process's result file in the step folder."""
RECORDING_SUFFIX = "_ascend_pt"
_INFO = re.compile(r"profiler_info_(\d+)\.json")
HANGS = "hangs"
"""Name of the folder in that of a run."""

_MOST_FILES = 64  # a page with the stacks of a thousand ranks says no more, and is large


def json_of(value: msgspec.Struct) -> bytes:
    """Return the content of a JSON file of a run: indented, and without the passwords of URLs."""
    try:
        content = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a surrogate pair, e.g. an exception with a model's answer
        content = msgspec.json.encode(visible_text_of(value))
    return without_passwords(msgspec.json.format(content, indent=2))


def write_json_atomically(path: Path, value: msgspec.Struct, *, durable: bool = True) -> None:
    """Write ``value`` as indented JSON, so that readers see the old or the new file.

    Args:
        path: The file.
        value: Content of the file.
        durable: Whether to wait until the file would survive a crash of the machine.

    Raises:
        OSError: The folder cannot be written.
    """
    with whole_file(path) as file:
        file.write(json_of(value))
        if durable:
            file.flush()
            os.fsync(file.fileno())


def read_run(run: Path) -> RunInfo | None:
    """Read ``run.json`` of a run's folder; ``None`` if the file is missing.

    Raises:
        TraceFormatError: ``run.json`` cannot be read.
    """
    path = run / RUN_NAME
    if not os.path.lexists(path):
        return None
    try:
        return msgspec.json.decode(_read(path), type=RunInfo)
    except UNDECODABLE as error:
        raise TraceFormatError(path, f"not the file of a run: {error}") from error


def known_run(run: Path) -> RunInfo | None:
    """Return :func:`read_run` of a run; also ``None`` for an unreadable file."""
    try:
        return read_run(run)
    except TraceFormatError:
        return None


def never_came(run: RunInfo | None) -> str:
    """Return a sentence on scheduled steps that the loop never began; empty if there are none.

    The sentence is also empty during training, and for a killed run.

    Args:
        run: The result of :func:`read_run`.
    """
    if run is None or not run.never_came:
        return ""
    ran = f"the loop ran from step {run.first_step} to step {run.last_step}"
    return f"{step_list(run.never_came)} of schedule.steps never came; {ran}"


def read_manifest(step_dir: Path) -> Manifest:
    """Read the manifest of a step folder, with newer results from the result files of the workers.

    Raises:
        TraceFormatError: The manifest is missing, invalid, or has a newer schema; or the folder is
            a link.
    """
    if step_dir.is_symlink():
        raise TraceFormatError(step_dir, f"is a link; give the folder itself, {step_dir.resolve()}")
    path = step_dir / MANIFEST_NAME
    data = _read(path, "; is this a step folder?")
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise TraceFormatError(
                path,
                f"schema version {version}, newer than {SCHEMA_VERSION}: update verl-profiling",
            )
        return _folded(step_dir, msgspec.json.decode(data, type=Manifest))
    except UNDECODABLE as error:
        raise TraceFormatError(path, f"not a manifest: {error}") from error


def write_result(folder: Path, worker: CaptureResult) -> None:
    """Write a worker's result after the run, with the highest revision.

    Raises:
        OSError: The folder cannot be written.
    """
    revision = worker.revision + 1
    path = folder / f"{worker.name}{RESULT_SUFFIX}"
    write_json_atomically(path, msgspec.structs.replace(worker, revision=revision))


def _folded(folder: Path, manifest: Manifest) -> Manifest:
    """Return a manifest with the newest result of each worker: its reply to the loop, which is in
    the manifest, or its result file.
    """
    notes = list(manifest.notes)
    results = _results(folder, manifest.capture_id, notes)
    workers = []
    for reply in manifest.workers:
        result = results.pop(_file_of(reply, results), None)
        if result is not None and (problem := _why_ignored(reply, result, manifest)):
            notes.append(problem)
            result = None
        workers.append(_settled(folder, _newer(reply, result)))
    workers += [_settled(folder, result) for result in results.values()]
    workers.sort(key=lambda w: (w.identity.role, w.identity.replica or 0, w.identity.rank))
    cut = [
        f"{CUT_SHORT}: {worker.name}: {worker.cut_short}" for worker in workers if worker.cut_short
    ]
    clocks = {
        worker.clock.clock_domain: worker.clock for worker in workers if worker.clock is not None
    }
    clocks |= {clock.clock_domain: clock for clock in manifest.clocks}
    return msgspec.structs.replace(
        manifest,
        complete=manifest.complete and not cut,
        workers=workers,
        clocks=list(clocks.values()),
        notes=list(dict.fromkeys([*notes, *cut])),
    )


def _results(folder: Path, capture_id: str, notes: list[str]) -> dict[str, CaptureResult]:
    """Return the results of a capture in its step folder by the names of their workers.

    ``notes`` gets a sentence for each result file that is unreadable or of another capture.
    """
    results: dict[str, CaptureResult] = {}
    for path in sorted(folder.glob(f"*{RESULT_SUFFIX}")):
        try:
            result = msgspec.json.decode(_read(path), type=CaptureResult)
        except (*UNDECODABLE, TraceFormatError) as error:
            notes.append(f"{path.name} cannot be read, so the reply is used: {error}")
            continue
        if capture_of(result.capture_id) == capture_id:
            results[result.name] = result
        else:
            notes.append(f"{path.name} belongs to another capture, and is ignored")
    return results


def _why_ignored(reply: CaptureResult, result: CaptureResult, manifest: Manifest) -> str:
    """Return why a worker's result file is ignored: another process wrote it, or it began after
    the step. Return an empty text if the file is valid.
    """
    if reply.process not in (None, result.process):
        return f"{result.name}{RESULT_SUFFIX} was written by {result.process}, and is ignored"
    if not reply.stopped and _began_after(result, manifest):
        return f"{result.name} began to record after the end of the step"
    return ""


def _file_of(worker: CaptureResult, results: dict[str, CaptureResult]) -> str:
    """Return the name of a worker's result file; guess the name if the worker never replied."""
    if worker.name in results or worker.revision:
        return worker.name
    who = worker.identity
    for name, result in results.items():
        other = result.identity
        same_rank = (other.role, other.rank, other.replica) == (who.role, who.rank, who.replica)
        if same_rank or (worker.process is not None and worker.process == result.process):
            return name
    return worker.name


def _began_after(result: CaptureResult, manifest: Manifest) -> bool:
    begins = [anchor.unix_ns - manifest.offset_ns(result.identity) for anchor in result.anchors[:1]]
    return manifest.state == "written" and any(begin_ns > manifest.end_ns for begin_ns in begins)


def capture_of(capture_id: str) -> str:
    """Return the capture's id; the id of one recorded stage has ``/`` and a number after it."""
    return capture_id.partition("/")[0]


def _newer(reply: CaptureResult, file: CaptureResult | None) -> CaptureResult:
    if file is None and not reply.revision:
        reason = "; ".join(filter(None, (reply.reason, _status(reply))))
        return msgspec.structs.replace(reply, reason=reason)
    if file is None or file.revision <= reply.revision:
        return reply
    if file.stopped or reply.status != "failed":
        return file
    listed = {artifact.path for artifact in file.artifacts}
    promised = [artifact for artifact in reply.artifacts if artifact.path not in listed]
    reason = reply.reason or file.reason
    return msgspec.structs.replace(file, artifacts=[*file.artifacts, *promised], reason=reason)


def _status(reply: CaptureResult) -> str:
    """Return a sentence on the process of a worker without a result."""
    process = reply.process
    if process is None or reply.status == "skipped" or process.alive():
        return ""
    if f"(pid {process.pid})" in reply.reason:  # the loop has seen it end
        return ""
    if process.alive() is False:
        return f"{process} has ended"
    return f"{process} cannot be checked on this host"


def _settled(folder: Path, worker: CaptureResult) -> CaptureResult:
    """Return a worker whose artifacts have final statuses, unless a process still writes them."""
    if not worker.artifacts:
        return worker
    return with_artifacts(
        worker, [_on_disk(folder, worker, artifact) for artifact in worker.artifacts]
    )


def _on_disk(folder: Path, worker: CaptureResult, artifact: Artifact) -> Artifact:
    path = None
    with suppress(TraceFormatError):
        path = written_file(folder, artifact.path)
    if artifact.where:
        if artifact.reason or path is None:  # a file with a reason was not uploaded
            return artifact
        artifact = msgspec.structs.replace(artifact, where="")  # it has been fetched
    # A pending artifact with a reason waits for a command, such as collect.
    waits = artifact.status == "pending" and not artifact.reason
    if not waits or not _is_over(folder, worker):
        return artifact
    if path is None:
        return artifact.with_status("failed", "never finished")
    is_raw = path.name != Path(artifact.path).name
    reason = "not compressed by the end of training (timeouts.finish_s)" if is_raw else ""
    return artifact.with_status("ok", reason, bytes=path.stat().st_size)


def pending_results(manifest: Manifest) -> set[str]:
    """Return the result files of the workers that have pending artifacts."""
    return {
        f"{worker.name}{RESULT_SUFFIX}"
        for worker in manifest.workers
        if any(artifact.status == "pending" for artifact in worker.artifacts)
    }


def written_file(folder: Path, name: str) -> Path | None:
    """Return the path of an artifact, or of its file that is not compressed yet;
    ``None`` without either.

    Raises:
        TraceFormatError: The path leads out of the step folder.
    """
    for path in (named_file(folder, name), named_file(folder, name.removesuffix(".gz"))):
        if path.exists():
            return path
    return None


def _is_over(folder: Path, worker: CaptureResult) -> bool:
    """Return whether no process writes a worker's artifacts any more."""
    if worker.process is not None and worker.process.alive() is False:
        return True
    run = known_run(folder.parent)
    return run is not None and run.end_ns is not None


def recorded_folder(where: str, name: str, worker: str, capture_id: str) -> Path:
    """Return the step folder on this host's disk that a manifest names as ``host:path``.

    A manifest may come from a stranger, and name any path. So the folder must hold the worker's
    result file of the same capture, which only the run wrote.

    Args:
        where: ``host:path`` of the file.
        name: Path of the file relative to the step folder.
        worker: Name of the worker that recorded the file.
        capture_id: Id of the capture that recorded the file.

    Raises:
        TraceFormatError: This run did not record the file here.
    """
    there = where.partition(":")[2]
    folder = Path(there.removesuffix(name))
    try:
        result = msgspec.json.decode(_read(folder / f"{worker}{RESULT_SUFFIX}"), type=CaptureResult)
    except (*UNDECODABLE, TraceFormatError):
        result = None
    if result is None or capture_of(result.capture_id) != capture_id:
        raise TraceFormatError(
            there, f"is not opened: no result of {worker} of this capture is beside it"
        )
    return folder


def _read(path: Path, hint: str = "") -> bytes:
    with reading(path, hint):
        return read_small(path)


class EventFile:
    """An event file of TensorBoard with numbers by step, written without torch and threads.

    Args:
        logdir: TensorBoard's ``--logdir``.
        wanted_by: Name of the feature that needs tensorboard, for errors.

    Raises:
        ToolUnavailableError: tensorboard is missing.
        OSError: The folder cannot be written.
    """

    def __init__(self, logdir: Path, wanted_by: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ToolUnavailableError(
                f"{wanted_by} needs {error.name}: pip install 'verl-profiling[tensorboard]'"
            ) from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        make_folder(logdir)
        source = f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        path = logdir / f"events.out.tfevents.{int(time.time()):010d}.{source}"
        self._path, self._writer = path, RecordWriter
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point to the curves.

        Args:
            step: Step of the point.
            scalars: Numbers by tag, the name of the curve.

        Raises:
            OSError: The disk is full.
        """
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        self._add(step, values)

    def add_text(self, step: int, tag: str, text: str) -> None:
        """Add a text, in Markdown.

        Args:
            step: Step of the text.
            tag: Name of the series of texts.
            text: The text.

        Raises:
            OSError: The disk is full.
        """
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        metadata = create_summary_metadata(display_name=None, description=None)
        tensor = make_tensor_proto([text])
        self._add(step, [self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        self._write(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )

    def _write(self, event: Any) -> None:
        with appended(self._path) as file:
            self._writer(file).write(event.SerializeToString())


def is_recording(path: Path) -> bool:
    """Return whether a path is a recording of torch_npu."""
    return path.name.endswith(RECORDING_SUFFIX) and path.is_dir()


def rank_of_recording(path: Path) -> int | None:
    """Return the rank in the file names of a recording; ``None`` without a rank."""
    for file in path.iterdir():
        if match := _INFO.fullmatch(file.name):
            return int(match[1])
    return None


class HangStacks(msgspec.Struct, frozen=True):
    """The stacks of a process in a hang.

    Attributes:
        lane: The process.
        code: The innermost line of user code.
        threads: Stack of each thread, innermost frame first.
        tasks: Stack of each asyncio task, outermost frame first.
    """

    lane: str
    code: str = ""
    threads: dict[str, list[str]] = {}
    tasks: dict[str, list[str]] = {}


def ended_hang(step: int) -> str:
    """Return the name of the folder, in ``hangs/``, of the hang of a step that went on."""
    return f"step_{step:06d}"


def read_stacks(folder: Path, sentence: str = "") -> list[HangStacks]:
    """Return the stacks of the processes of a hang; unreadable files are left out.

    Args:
        folder: ``hangs/`` or a folder in it.
        sentence: A sentence on the hang; the process for which the others wait comes first.
    """
    stacks: dict[str, HangStacks] = {}
    try:
        names = [name for name in names_in(folder) if name.endswith(".json")]
        names.sort(key=lambda name: (f"waits for {name[:-5]}," not in sentence, name))
        for name in names[:_MOST_FILES]:
            state = msgspec.json.decode(read_small(folder / name), type=HangStacks)
            stacks[state.lane] = state
    except (OSError, *UNDECODABLE):  # they go away when the step goes on
        pass
    return [*stacks.values()]
