"""Packs the traces of one step into a Perfetto archive, without parsing them.

The archive is a tar whose first file is a trace manifest; it says which lane each trace is
and how its clock relates to the others. The format is documented at
https://perfetto.dev/docs/reference/perfetto-manifest and read by Perfetto v58 and later.
Arrows cannot cross the files of an archive; use the merged timeline to see them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.controller import CONTROLLER
from verl_profiling.timeline.reader import Trace
from verl_profiling.timeline.sources import Source, StepInputs

__all__ = ["ARCHIVE_NAME", "write_archive"]

ARCHIVE_NAME = "timeline.tar"
_COPY_BYTES = 1 << 20
_MANIFEST_NAME = "perfetto_manifest.json"


class _Entry(msgspec.Struct, frozen=True):
    name: str
    path: Path
    machine: str
    base_ns: int


def write_archive(
    inputs: StepInputs, output: Path | None = None, on_progress: Callable[[Path], None] | None = None
) -> tuple[Path, list[str]]:
    """Write the archive of one step.

    Args:
        inputs: The step.
        output: File to write; by default ``timeline.tar`` in the step's folder.
        on_progress: Called with each trace when it is in.

    Returns:
        The archive, and what could not be put into it, as sentences.

    Raises:
        TraceFormatError: There is no trace in the step.
        OSError: The archive cannot be written.
    """
    output = output or inputs.directory / ARCHIVE_NAME
    entries, problems = _entries(inputs)
    if not entries:
        raise TraceFormatError(inputs.directory, "; ".join(problems) or "holds no trace to archive")
    partial = output.with_name(f".{output.name}.part")
    try:
        with tarfile.TarFile(partial, "w", format=tarfile.USTAR_FORMAT, copybufsize=_COPY_BYTES) as tar:
            manifest = msgspec.json.format(msgspec.json.encode(_manifest(entries)))
            head = tarfile.TarInfo(_MANIFEST_NAME)
            head.size = len(manifest)
            tar.addfile(head, io.BytesIO(manifest))
            for entry in entries:
                tar.add(entry.path, entry.name)
                if on_progress:
                    on_progress(entry.path)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)
    return output, problems


def _entries(inputs: StepInputs) -> tuple[list[_Entry], list[str]]:
    """Return what goes in: only the head of each trace is read, for its clock."""
    entries, problems = [], list(inputs.absent)
    sources = list(inputs.sources)
    if inputs.controller:
        sources.insert(0, Source(path=inputs.controller, lane=CONTROLLER, worker=CONTROLLER, role=CONTROLLER))
    for source in sources:
        try:
            base = Trace(source.path).metadata.get("baseTimeNanoseconds", 0)
        except TraceFormatError as error:
            problems.append(str(error))
            continue
        name = f"{source.lane}/{source.path.name}"
        entries.append(_Entry(name, source.path, source.lane, base - source.offset_ns))
    return entries, problems


def _manifest(entries: list[_Entry]) -> dict[str, object]:
    """Return the trace manifest: a reading of 0 in a file is ``offset_ns`` on the timeline."""
    first_ns = min(entry.base_ns for entry in entries)
    files = [
        {
            "path": entry.name,
            "machine": {"name": entry.machine},
            "clocks": {"offset_ns": entry.base_ns - first_ns},
        }
        for entry in entries
    ]
    return {"perfetto_manifest": {"version": 1, "files": files}}
