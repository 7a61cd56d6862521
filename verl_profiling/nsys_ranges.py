"""The record that the ``nsys`` tool keeps of each range that it opens, read when reports are collected.

Nsight Systems numbers its reports by process and range, and only the process knows to which step
and stage a range belongs. It appends a line per range to a file beside the reports, so a crash
loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

NSYS_FOLDER = "nsys"
"""Folder of the run in which Nsight Systems leaves its reports."""

NOTES_SUFFIX = ".ranges.jsonl"
"""Suffix of a process's file of ranges; the stem is that of its reports' names."""


class NsysRange(msgspec.Struct, frozen=True, kw_only=True):
    """One range.

    Attributes:
        number: Its number in the process, from 1.
        folder: Path of the step folder it belongs to, below ``save_path``.
        artifact: Name of the artifact that its report becomes.
        begin_ns: When it was opened.
        end_ns: When it was closed; 0 when the process ended before.
        keep: ``False`` for a warm-up, whose report is discarded.
    """

    number: int
    folder: str
    artifact: str
    begin_ns: int
    end_ns: int = 0
    keep: bool = True


def _warn(path: Path, problem: str) -> None:
    logger.warning("%s: %s", path, problem)


def read_ranges(folder: Path, on_problem: Callable[[Path, str], None] = _warn) -> dict[Path, list[NsysRange]]:
    """Return the ranges of every process, by the stem of its reports' names.

    Args:
        folder: The folder with the notes.
        on_problem: Called with each file of notes that has a line that cannot be read, and why.
    """
    found = {}
    for path in sorted(folder.glob(f"*{NOTES_SUFFIX}")):
        latest: dict[int, NsysRange] = {}
        for line in path.read_bytes().splitlines():
            try:
                noted = msgspec.json.decode(line, type=NsysRange)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                # A process that was killed leaves half a line; the whole ones hold.
                on_problem(path, f"a line is torn, and the range it noted is lost: {error}")
                continue
            latest[noted.number] = noted
        found[path.with_name(path.name.removesuffix(NOTES_SUFFIX))] = sorted(
            latest.values(), key=lambda noted: noted.number
        )
    return found
