"""Marks of a process: named parts of its start, before anything of it is recorded.

They are few, and kept whether profiling is on or not: at that time, nobody knows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import verl_profiling
from verl_profiling import clock
from verl_profiling.identity import ProcessId

SUBMITTED = "VERL_PROFILING_SUBMITTED"
"""Environment variable with the time at which the job was submitted (unix seconds)."""

PROCESS, IMPORT, SUBMIT = "process", "import", "submit"
"""Parts of a start: from the creation of a process to the import of this package, from there to the
begin of its work, and from the submission of the job to the creation of the loop's process.
"""

START_UP = "start_up.json"
"""File of the start-up in the folder of a run: a step summary with the stages of all processes."""

_MOST = 256  # the start of an engine has some ten
_POOL = "RAY_RAYLET_PID"  # Ray sets it in the processes of its pool
_IS_BUSY = 0.5  # of the time; a process of the pool has waited for an actor otherwise

_marks: list[tuple[str, int, int]] = []
"""Name, begin and end (unix ns)."""

_is_taken = False


def add_mark(name: str, begin_ns: int) -> None:
    """Add a mark that ends now."""
    if len(_marks) < _MOST:
        _marks.append((name, begin_ns, clock.now_ns()))


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Mark a block."""
    begin_ns = clock.now_ns()
    try:
        yield
    finally:
        add_mark(name, begin_ns)


def note_import() -> None:
    """Note that the work of this process begins: until now, it has imported modules for it."""
    if not _marks:
        add_mark(IMPORT, verl_profiling.IMPORTED[0])


def taken_marks() -> list[tuple[str, int, int]]:
    """Return the marks of this process, the first time.

    One is its creation, unless a pool of Ray created it, and it idled there.
    """
    global _is_taken
    if _is_taken:
        return []
    _is_taken = True
    imported_ns, busy_ns = verl_profiling.IMPORTED
    created = created_ns() or imported_ns
    is_busy = busy_ns > _IS_BUSY * (imported_ns - created)
    if is_busy or _POOL not in os.environ:
        _marks.append((PROCESS, created, imported_ns))
    return _marks


def created_ns() -> int | None:
    """Return when this process was created (unix ns, exact to 10 ms); ``None`` if unknown."""
    with suppress(ValueError, AttributeError, OSError):
        since_boot_s = int(ProcessId.current().started) / os.sysconf("SC_CLK_TCK")
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return clock.now_ns() - round((now_s - since_boot_s) * 1e9)
    return None


def submitted_ns() -> int | None:
    """Return when the job was submitted (unix ns); ``None`` if unknown."""
    with suppress(ValueError, OverflowError):
        return round(float(os.environ.get(SUBMITTED, "")) * 1e9)
    return None
