"""What the ``nsys`` tool notes about each range that it opens, for collecting the reports later.

Nsight Systems numbers its reports by process and range; only the process knows which step and
stage a range was. It appends to a file beside the reports, so that a crash loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["NSYS_FOLDER", "NsysRange", "note_range", "read_ranges"]

NSYS_FOLDER = "nsys"
"""Folder of the run in which Nsight Systems leaves its reports."""

_SUFFIX = ".ranges.jsonl"


class NsysRange(msgspec.Struct, frozen=True, kw_only=True):
    """One range.

    Attributes:
        number: Its number in the process, from 1.
        folder: Name of the step folder it belongs to.
        artifact: Name of the artifact that its report becomes.
        begin_ns: When it was opened.
        end_ns: When it was closed; 0 when the process ended before.
        keep: ``False`` for a warm-up, whose report is thrown away.
    """

    number: int
    folder: str
    artifact: str
    begin_ns: int
    end_ns: int = 0
    keep: bool = True


def note_range(output: Path, noted: NsysRange) -> None:
    """Append to the notes of the process whose reports are named after ``output``.

    The first range begins them anew: an earlier run's process may have had the same id.

    Raises:
        OSError: They cannot be written.
    """
    mode = "wb" if noted.number == 1 and not noted.end_ns else "ab"
    with output.with_name(output.name + _SUFFIX).open(mode) as file:
        file.write(msgspec.json.encode(noted) + b"\n")


def read_ranges(folder: Path) -> dict[Path, list[NsysRange]]:
    """Return the ranges of every process, by what their reports are named after."""
    found = {}
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        latest: dict[int, NsysRange] = {}
        for line in path.read_bytes().splitlines():
            noted = msgspec.json.decode(line, type=NsysRange)
            latest[noted.number] = noted
        found[path.with_name(path.name.removesuffix(_SUFFIX))] = sorted(
            latest.values(), key=lambda noted: noted.number
        )
    return found
