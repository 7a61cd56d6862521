"""What the ``nsys`` tool notes about each range that it opens, for collecting the reports later.

Nsight Systems numbers its reports by process and range; only the process knows which step and
stage a range was. It appends to a file beside the reports, so that a crash loses nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["NOTES_SUFFIX", "NSYS_FOLDER", "NsysRange", "read_ranges"]

NSYS_FOLDER = "nsys"
"""Folder of the run in which Nsight Systems leaves its reports."""

NOTES_SUFFIX = ".ranges.jsonl"
"""What the notes of a process end in, after what its reports are named after."""


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


def read_ranges(folder: Path) -> dict[Path, list[NsysRange]]:
    """Return the ranges of every process, by what their reports are named after."""
    found = {}
    for path in sorted(folder.glob(f"*{NOTES_SUFFIX}")):
        latest: dict[int, NsysRange] = {}
        for line in path.read_bytes().splitlines():
            noted = msgspec.json.decode(line, type=NsysRange)
            latest[noted.number] = noted
        found[path.with_name(path.name.removesuffix(NOTES_SUFFIX))] = sorted(
            latest.values(), key=lambda noted: noted.number
        )
    return found
