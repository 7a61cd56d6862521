"""Packs the traces of one step into a Perfetto archive, without parsing them.

The archive is a tar whose first file is a trace manifest, which names the lane of each trace and
relates its clock to the others. The format is documented at
https://perfetto.dev/docs/reference/perfetto-manifest and read by Perfetto v58 and later. The
manifest cannot describe a compressed file, so compressed traces are unpacked. Arrows cannot cross
the files of an archive; use the merged timeline to see them.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.timeline.decompress import Blocks, is_gzip
from verl_profiling.timeline.reader import Trace
from verl_profiling.timeline.step_inputs import StepInputs
from verl_profiling.timeline.whole_files import whole_file

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
        on_progress: Called with each trace once it is packed.

    Returns:
        The archive, and what could not be put into it, as sentences.

    Raises:
        TraceFormatError: There is no trace in the step.
        OSError: A trace cannot be read, or the archive cannot be written.
    """
    output = output or inputs.output(ARCHIVE_NAME)
    entries, problems = _entries(inputs)
    if not entries:
        raise TraceFormatError(inputs.directory, "; ".join(problems) or "holds no trace to archive")
    with whole_file(output) as file:
        manifest = msgspec.json.format(msgspec.json.encode(_manifest(entries)))
        with _member(file, _MANIFEST_NAME):
            file.write(manifest)
        for entry in entries:
            with _member(file, entry.name):
                damage = _copy(entry.path, file, inputs.limits.content_bytes)
            if damage:
                problems.append(f"{entry.path.name}: {damage}")
            if on_progress:
                on_progress(entry.path)
        file.write(bytes(2 * tarfile.BLOCKSIZE))  # the end of a tar
    return output, problems


@contextmanager
def _member(archive: BinaryIO, name: str) -> Iterator[None]:
    """Write the block's output as a file of the tar; the header is written last, once the size is known."""
    start = archive.tell()
    archive.write(bytes(tarfile.BLOCKSIZE))
    yield
    head = tarfile.TarInfo(name)
    head.size = archive.tell() - start - tarfile.BLOCKSIZE
    archive.write(bytes(-head.size % tarfile.BLOCKSIZE))
    archive.seek(start)
    archive.write(head.tobuf(tarfile.GNU_FORMAT))
    archive.seek(0, os.SEEK_END)


def _copy(path: Path, archive: BinaryIO, limit: int) -> str:
    """Append the content of a trace; return the damage that ended it early, or ``""``."""
    with path.open("rb") as file:
        if not is_gzip(file):
            shutil.copyfileobj(file, archive, _COPY_BYTES)
            return ""
    blocks = Blocks(path, limit=limit)
    for block in blocks:
        archive.write(block)
    return blocks.damage


def _entries(inputs: StepInputs) -> tuple[list[_Entry], list[str]]:
    """Return the entries to pack. Only the head of each trace is read, for its clock."""
    entries, problems = [], list(inputs.absent)
    problems += (
        f"{log.path.name}: an archive holds traces only; a merged timeline shows it" for log in inputs.logs
    )
    sources = list(inputs.sources)
    for source in sources:
        try:
            base = Trace(source.path, inputs.limits).base_ns
        except TraceFormatError as error:
            problems.append(str(error))
            continue
        name = f"{source.lane}/{source.path.name.removesuffix('.gz')}"
        entries.append(_Entry(name, source.path, source.title, base - source.offset_ns))
    return entries, problems


def _manifest(entries: list[_Entry]) -> dict[str, object]:
    """Return the trace manifest, which relates every clock to that of the file with the earliest base.

    At the same instant a file's clock reads ``T`` and that reference clock ``T + offset_ns``.
    """
    first = min(entries, key=lambda entry: entry.base_ns)
    files: list[dict[str, object]] = []
    for entry in entries:
        files.append({"path": entry.name, "machine": {"name": entry.machine}})
        if entry is not first:
            offset_ns = entry.base_ns - first.base_ns
            files[-1]["clocks"] = {"sync_to": {"file": first.name}, "offset_ns": offset_ns}
    return {"perfetto_manifest": {"version": 1, "files": files}}
