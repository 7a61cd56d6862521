"""The identity of a worker, and the file names that follow from the identity."""

from __future__ import annotations

import os
import re
import socket
import sys
from functools import cache
from pathlib import Path
from zlib import crc32

import msgspec

from verl_profiling import clock

__all__ = [
    "ROLLOUT_ROLE",
    "ProcessId",
    "WorkerIdentity",
    "artifact_name",
    "safe_name",
    "step_folder_name",
]

ROLLOUT_ROLE = "rollout"
"""Role of the replicas of rollout engines. Before a worker's first reply, only its role tells
that the worker is a replica.
"""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """The unique identity of a process on any machine.

    Attributes:
        host: Host name, for people.
        clock_domain: Identity of the machine, see :func:`verl_profiling.clock.domain`.
        pid: Process id.
        namespace: Namespace of ``pid`` (containers have their own), if there are namespaces.
        started: Start time in the kernel's ticks, because a later process may get the same id.
    """

    host: str
    clock_domain: str
    pid: int
    namespace: str = ""
    started: str = ""

    @classmethod
    def current(cls) -> ProcessId:
        """Return the identity of the calling process."""
        return _process(os.getpid())

    def alive(self) -> bool | None:
        """Return whether the process still runs; ``None`` if this is unknown on this host."""
        if (self.clock_domain, self.namespace) != (clock.domain(), pid_namespace()):
            return None
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):  # a file may name any number
            return False
        except PermissionError:
            pass
        return _start_ticks(self.pid) == self.started

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


@cache
def _process(pid: int) -> ProcessId:
    """Return the identity of a process id, cached for the life of the process."""
    return ProcessId(
        host=socket.gethostname(),
        clock_domain=clock.domain(),
        pid=pid,
        namespace=pid_namespace(),
        started=_start_ticks(pid),
    )


def pid_namespace() -> str:
    """Return the namespace of this process's id; empty on a system without namespaces."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_ticks(pid: int) -> str:
    """Return field 22 of ``/proc/<pid>/stat``; empty for an ended process or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return fields[19] if fields[0] not in "ZX" else ""


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of one role.

    Attributes:
        role: Role of the worker group, e.g. ``actor``.
        rank: Global rank inside the role; for a rollout engine, the rank of its first accelerator.
        world_size: Number of ranks of the role.
        replica: Index of the rollout replica; ``None`` for every other role.
        node_rank: Node index inside a replica that spans several nodes.
        topology: Coordinates in named parallel dimensions, e.g. ``{"dp": 1, "tp": 0}``.
        sizes: Number of ranks along these dimensions, e.g. ``{"dp": 2, "tp": 4}``, if known.
        host: Host name, for people.
        clock_domain: See :func:`verl_profiling.clock.domain`; equal domains need no clock
            correction.
        pid: Process id on ``host``; 0 before the first reply of the worker.
        namespace: Namespace of ``pid``, as of a :class:`ProcessId`.
    """

    role: str
    rank: int = 0
    world_size: int = 1
    replica: int | None = None
    node_rank: int = 0
    topology: dict[str, int] = {}
    sizes: dict[str, int] = {}
    host: str = msgspec.field(default_factory=socket.gethostname)
    clock_domain: str = msgspec.field(default_factory=lambda: clock.domain())
    pid: int = msgspec.field(default_factory=os.getpid)
    namespace: str = pid_namespace()

    @property
    def is_engine(self) -> bool:
        """Whether the worker is a replica of an engine, with a lane per rank."""
        return self.replica is not None

    @property
    def name(self) -> str:
        """Name of the worker, e.g. ``actor_rank3``, or ``rollout0`` for a rollout replica.

        For a rank of a model-parallel group, coordinates are appended: ``actor_rank3_tp1_pp1``.
        Data-parallel coordinates are left out, because the rank implies them.
        """
        role = safe_name(self.role)
        if self.replica is not None:
            return f"{role}{self.replica}"
        name = f"{role}_rank{self.rank}"
        for dimension, index in self.topology.items():
            if self.sizes.get(dimension, 1) > 1 and not dimension.startswith("dp"):
                name += f"_{safe_name(dimension)}{index}"
        return name

    def lane(self, rank: int | None = None) -> str:
        """Return the name of a rank's process on the timeline (its lane).

        For example ``actor_rank3``, or ``rollout0_rank1`` in a replica.

        Args:
            rank: For a replica, the rank of the engine's process inside the replica (default 0).
        """
        return self.name if self.replica is None else f"{self.name}_rank{rank or 0}"

    def __str__(self) -> str:
        process = f"pid {self.pid} on {self.host}" if self.pid else "which has never replied"
        if self.replica is not None:
            return f"{self.role} replica {self.replica} node {self.node_rank} ({process})"
        return f"{self.role} rank {self.rank} ({process})"


def process_rank() -> tuple[int, int] | None:
    """Return rank and world size of this process; ``None`` if unknown.

    The source is ``torch.distributed``, if initialised, else the launcher's RANK and WORLD_SIZE.
    torch is not imported.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return (rank, world_size) if 0 <= rank < world_size else None


def safe_name(text: str) -> str:
    """Return ``text`` with all unsafe characters for a file name replaced by ``-``;
    at most 80 characters.
    """
    return _UNSAFE.sub("-", text)[:80] or "-"


def step_folder_name(step: int, recording: int = 1) -> str:
    """Return the step folder's name, e.g. ``step_000012``,
    or ``step_000012.2`` for a second recording.
    """
    return f"step_{step:06d}" + (f".{recording}" if recording > 1 else "")


def artifact_name(lane: str, suffix: str, stage: str | None = None, occurrence: int = 1) -> str:
    """Return an artifact's file name.

    Args:
        lane: Lane of the recording rank, e.g. ``actor_rank0``.
        suffix: The tool's suffix, e.g. ``.torch.json.gz``.
        stage: The recorded stage, in discrete mode; ``None`` for a recording of the whole step.
        occurrence: 1 for the first time that the stage runs in the step, 2 for the second, ...

    Returns:
        For example ``actor_rank0.update_actor.2.torch.json.gz``. A stage with unsafe characters
        also has a
            checksum, so that ``a/b`` and ``a-b`` have different files.
    """
    parts = [lane]
    if stage is not None:
        safe = safe_name(stage)
        parts.append(
            safe if safe == stage else f"{safe}-{crc32(stage.encode(errors='replace')):08x}"
        )
        if occurrence > 1:
            parts.append(str(occurrence))
    return ".".join(parts) + suffix
