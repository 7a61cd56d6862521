"""Adds the start of a process, and the calls of its engines, to its stages and spans."""

from __future__ import annotations

from verl_profiling.files.engine_marks import MarkReader
from verl_profiling.files.process_marks import taken_marks
from verl_profiling.watch.process_sums import StageSums


def add_marks(sums: StageSums, until_ns: int) -> None:
    """Add the marks of this process, once, to its stages; later marks are of no start-up.

    Args:
        sums: The stages.
        until_ns: End of the start-up (unix ns).
    """
    for name, begin_ns, end_ns in taken_marks():
        if end_ns <= until_ns:
            sums.ended.append((name, begin_ns, end_ns, 0, 0))  # its memory is not that of now


def add_engine_marks(reader: MarkReader, sums: StageSums) -> None:
    """Add the new marks of engines: of their start as stages, of sleep and wake as spans."""
    for mark in reader.read():
        if mark.is_of_step:
            sums.spans.add(mark.name, mark.begin_ns, mark.end_ns, failed=False)
        else:
            sums.ended.append((mark.name, mark.begin_ns, mark.end_ns, 0, 0))
