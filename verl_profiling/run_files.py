"""Files of a run: written whole or not at all, and read with an error that names them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, SCHEMA_VERSION, CaptureResult, Manifest, RunInfo
from verl_profiling.named_files import check_lane, named_file
from verl_profiling.units import step_list

__all__ = [
    "RESULT_SUFFIX",
    "naming",
    "never_came",
    "read_manifest",
    "read_result",
    "read_starts",
    "run_file_name",
    "write_json_atomically",
    "write_json_exclusively",
]

RESULT_SUFFIX = ".result.json"
"""Suffix of what a worker leaves in the step folder when nobody is there to take its result."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


@contextmanager
def naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Let errors of writing say where: those of a full disk name no file.

    Args:
        path: What is written.
        temporary: The file or folder that becomes it; errors do not name that.

    Raises:
        OSError: Whatever was raised inside, with a file name.
    """
    try:
        yield
    except OSError as error:
        is_part = temporary is not None and str(error.filename).startswith(str(temporary))
        if (error.filename is not None and not is_part) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json_atomically(path: Path, value: msgspec.Struct) -> None:
    """Write ``value`` as indented JSON, so that readers see the old file or the new one.

    Raises:
        OSError: The folder cannot be written.
    """
    with _written_beside(path, value) as part:
        part.replace(path)


def write_json_exclusively(path: Path, value: msgspec.Struct) -> bool:
    """Write ``value`` unless ``path`` exists; return whether it was written. One of several writers wins.

    Raises:
        OSError: The folder cannot be written.
    """
    with _written_beside(path, value) as part:
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            try:
                with path.open("xb") as file:
                    file.write(part.read_bytes())
            except FileExistsError:
                return False
    return True


@contextmanager
def _written_beside(path: Path, value: msgspec.Struct) -> Iterator[Path]:
    """Yield a finished temporary file beside ``path``; gone afterwards, unless it was renamed."""
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        with naming(path), part.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(value), indent=2))
            file.flush()
            os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def run_file_name(start: int) -> str:
    """Return the name of the file that a start of a run leaves: ``run.json``, ``run.2.json``, ..."""
    return RUN_NAME if start == 1 else f"run.{start}.json"


def read_starts(run: Path) -> list[RunInfo]:
    """Read what the starts of a run left in its folder, in order.

    Raises:
        TraceFormatError: One cannot be read.
    """
    starts: list[RunInfo] = []
    while (path := run / run_file_name(len(starts) + 1)).exists():
        data = _read(path)
        try:
            starts.append(msgspec.json.decode(data, type=RunInfo))
        except _UNREADABLE as error:
            raise TraceFormatError(path, f"not the file of a run: {error}") from error
    return starts


def never_came(starts: Sequence[RunInfo]) -> str:
    """Return a sentence on the steps of the schedule that no start of a run came to; empty, if all came.

    The last start knows, once it has ended; of one that was killed, or still trains, nothing is said.

    Args:
        starts: What :func:`read_starts` returned.
    """
    if not starts or not starts[-1].never_came:
        return ""
    last = starts[-1]
    which = f"start {last.start} of the run" if len(starts) > 1 else "the loop"
    ran = f"{which} ran from step {last.first_step} to step {last.last_step}"
    return f"{step_list(last.never_came)} of schedule.steps never came; {ran}"


def read_manifest(step_dir: Path) -> Manifest:
    """Read ``manifest.json`` of a step folder.

    Raises:
        TraceFormatError: It is missing, is not a manifest, or has a newer schema.
    """
    path = step_dir / MANIFEST_NAME
    data = _read(path, "; is this a step folder?")
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("schema_version")
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise TraceFormatError(
                path, f"schema version {version}, newer than {SCHEMA_VERSION}: update verl-profiling"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except _UNREADABLE as error:
        raise TraceFormatError(path, f"not a manifest: {error}") from error
    for worker in manifest.workers:
        for artifact in worker.artifacts:
            check_lane(path, artifact.lane)
    return manifest


def read_result(path: Path) -> CaptureResult:
    """Read what a worker has left of a capture.

    Raises:
        TraceFormatError: It cannot be read.
    """
    try:
        result = msgspec.json.decode(_read(path), type=CaptureResult)
    except _UNREADABLE as error:
        raise TraceFormatError(path, f"not the result of a worker: {error}") from error
    for artifact in result.artifacts:
        check_lane(path, artifact.lane)
    return result


def _read(path: Path, hint: str = "") -> bytes:
    try:
        return named_file(path.parent, path.name).read_bytes()
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read ({error.strerror}){hint}") from error
