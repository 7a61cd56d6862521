"""The last known state of each process of a run, on disk before the process may die."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.files.device_use import DeviceUse
from verl_profiling.files.host_use import MachineUse, ProcessUse
from verl_profiling.files.opener import UNDECODABLE, read_small, reading
from verl_profiling.identity import ProcessId, safe_name
from verl_profiling.manifest import Count, Ns

RECORDS = "processes"
"""Folder of the records in the folder of a run."""


class Gone(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process that another one found dead.

    Attributes:
        at_ns: When it died (unix ns).
        lane: Its lane.
        pid: Its process id.
        signal: Number of the signal that killed it, if its parent looked; 0 otherwise.
        oom_kills: Processes of the container that the kernel has killed for memory since the last
            reading of the process.
    """

    at_ns: Ns
    lane: str
    pid: int
    signal: int = 0
    oom_kills: Count = 0


class End(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a process ended, or what failed in it last.

    Attributes:
        at_ns: When (unix ns).
        error: Last line of the traceback; empty if it ended without an exception.
        types: Names of the types of the exception, and of those that it was raised from.
        errno: Number of the operating system's error; 0 for others.
        stage: The stage that raised.
        is_fatal: Whether it left the loop, or nobody caught it.
        code: Innermost line of user code in the traceback.
        pid: Process that the exception is about, as Ray says; 0 if unknown.
        has_left: Whether the process ran to its exit, if it failed perhaps long after that.
    """

    at_ns: Ns
    error: str = ""
    types: list[str] = []
    errno: int = 0
    stage: str = ""
    is_fatal: bool = False
    code: str = ""
    pid: int = 0
    has_left: bool = False


class ProcessRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The file ``<lane>.<host>.<pid>.json`` of a process.

    Attributes:
        lane: Its lane.
        role: Its role.
        process: The process.
        at_ns: Time of its last reading (unix ns).
        step: The step of the loop, in the loop's process.
        stage: Its open outermost stage; empty for none.
        use: Its memory and its waits for a CPU.
        machine: The memory of its machine.
        device: The memory of its device; ``None`` if it has used none.
        oom_kills: Processes of the container that had been killed for memory at its last reading.
        gone: Processes of this machine that it saw die.
        end: Its end, or its last failure.
    """

    lane: str
    role: str
    process: ProcessId
    at_ns: Ns = 0
    step: int | None = None
    stage: str = ""
    use: ProcessUse = ProcessUse()
    machine: MachineUse | None = None
    device: DeviceUse | None = None
    oom_kills: Count = 0
    gone: list[Gone] = []
    end: End | None = None

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"{self.lane}.{safe_name(self.process.host)}.{self.process.pid}.json"


def read_records(
    folder: Path, host: str | None = None, known: Collection[str] = ()
) -> Iterator[ProcessRecord]:
    """Yield the records in a folder; damaged files are left out.

    Args:
        folder: The folder.
        host: Name of the only host whose processes are read; ``None`` for all.
        known: Names of files that are left out.
    """
    for path in sorted(folder.glob("[!.]*.json")):
        if path.name in known:
            continue
        if host is not None and not path.name.rsplit(".", 2)[0].endswith(f".{safe_name(host)}"):
            continue
        with suppress(OSError, TraceFormatError, *UNDECODABLE), reading(path):
            yield msgspec.json.decode(read_small(path), type=ProcessRecord)
