"""How the processes of one run reach each other: keys and values, and nothing that all must do at once.

Where ``torch.distributed`` is initialised, the values go over its default store, which every process
group has for its own rendezvous. A store is no collective: it cannot come between those of the training.
Otherwise they are files in ``save_path``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from verl_profiling import clock
from verl_profiling.identity import ProcessId, safe_name

__all__ = [
    "PROBLEMS",
    "Channel",
    "FileChannel",
    "StoreChannel",
    "default_store",
    "find_leader_files",
    "in_a_line",
    "lead_files",
]

PROBLEMS = (OSError, RuntimeError, ValueError, msgspec.MsgspecError)
"""What a channel raises, and the reading of what is found in it."""


def in_a_line(error: Exception) -> str:
    """Return an error without the frames that a store adds to it."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


_CHUNK_BYTES = 1 << 20  # TCPStore refuses values of 8 MiB
_SKEW_NS = 5_000_000_000
_LEADER = "leader"
_JOB_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


class Channel(Protocol):
    """What one process leaves for others. Errors are ``OSError`` or ``RuntimeError``."""

    def put(self, key: str, value: bytes) -> None:
        """Leave a value under a key that has none yet."""

    def get(self, key: str) -> bytes | None:
        """Return what is under a key, or ``None``; never waits for it."""

    def has(self, key: str) -> bool:
        """Return whether a value is under a key."""

    def take(self, key: str) -> bytes | None:
        """Like :meth:`get`, and remove it; the key itself last, so that it can be used again."""

    def close(self) -> None:
        """Remove what was left for nobody."""

    @property
    def closed(self) -> bool:
        """Whether a process has closed it."""


class StoreChannel:
    """Over a store of ``torch.distributed``, which is asked and never waited on: waiting would block it.

    Args:
        store: The store.
        prefix: What sets the keys apart from everybody else's.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore(prefix, store)

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Channel`."""
        chunks = [value[at : at + _CHUNK_BYTES] for at in range(0, len(value), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"{key}/{number}", chunk)
        self._store.set(key, str(len(chunks)))

    def get(self, key: str) -> bytes | None:
        """See :class:`Channel`."""
        parts = self._parts(key)
        return None if parts is None else b"".join(self._store.get(part) for part in parts)

    def take(self, key: str) -> bytes | None:
        """See :class:`Channel`."""
        parts = self._parts(key)
        if parts is None:
            return None
        value = b"".join(self._store.get(part) for part in parts)
        for part in [*parts, key]:
            self._store.delete_key(part)
        return value

    def has(self, key: str) -> bool:
        """See :class:`Channel`."""
        return bool(self._store.check([key]))

    def close(self) -> None:
        """See :class:`Channel`; the store is not ours."""

    @property
    def closed(self) -> bool:
        """See :class:`Channel`."""
        return False

    def _parts(self, key: str) -> list[str] | None:
        if not self._store.check([key]):
            return None
        return [f"{key}/{number}" for number in range(int(self._store.get(key)))]


class FileChannel:
    """Over files in a folder that all processes see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, value: bytes) -> None:
        """See :class:`Channel`."""
        path = self._path(key)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        part.write_bytes(value)
        part.replace(path)

    def get(self, key: str) -> bytes | None:
        """See :class:`Channel`."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(f"{self._path(key)} is not a file")
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def has(self, key: str) -> bool:
        """See :class:`Channel`."""
        return os.path.lexists(self._path(key))

    def take(self, key: str) -> bytes | None:
        """See :class:`Channel`."""
        value = self.get(key)
        if value is not None:  # one that came since must stay
            self._path(key).unlink(missing_ok=True)
        return value

    def close(self) -> None:
        """See :class:`Channel`."""
        closed = self._folder.parent.with_name(f".{self._folder.name}")
        try:
            self._folder.rename(closed)  # or what somebody writes there meanwhile would stay
        except OSError:
            closed = self._folder
        shutil.rmtree(closed, ignore_errors=True)
        for parent in (self._folder.parent, self._folder.parent.parent):
            with contextlib.suppress(OSError):  # another run's are in it
                parent.rmdir()

    @property
    def closed(self) -> bool:
        """See :class:`Channel`."""
        return not self._folder.is_dir()

    def _path(self, key: str) -> Path:
        return self._folder / safe_name(key.replace("/", "_"))


class _Leader(msgspec.Struct, frozen=True):
    process: ProcessId
    begin_ns: int


def lead_files(save_path: Path) -> FileChannel:
    """Make the folder over which the other processes of this job find this one."""
    folder = _job_folder(save_path) / uuid.uuid4().hex[:12]
    folder.mkdir(parents=True)
    channel = FileChannel(folder)
    channel.put(_LEADER, msgspec.json.encode(_Leader(ProcessId.current(), clock.now_ns())))
    return channel


def find_leader_files(save_path: Path, since_ns: int) -> FileChannel | None:
    """Return the folder of the process that leads this job, or ``None`` while there is none.

    One that a crashed job left is passed over: its process is gone or, where that cannot be seen from
    here, it is older than this one.

    Args:
        save_path: The settings' ``save_path``.
        since_ns: When this process began to take part.
    """
    found = []
    for folder, leader in _leaders(save_path):
        alive = leader.process.alive()
        if alive or (alive is None and leader.begin_ns > since_ns - _SKEW_NS):
            found.append((leader.begin_ns, folder))
    return FileChannel(max(found)[1]) if found else None


def default_store() -> Any:
    """Return the store of the default process group, or ``None``. It imports no torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store()


def _leaders(save_path: Path) -> Iterator[tuple[Path, _Leader]]:
    for path in _job_folder(save_path).glob(f"*/{_LEADER}"):
        try:
            yield path.parent, msgspec.json.decode(path.read_bytes(), type=_Leader)
        except (OSError, msgspec.DecodeError):
            continue


def _job_folder(save_path: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Return a folder that the processes of one job agree on."""
    job = "\n".join(environment.get(name, "") for name in _JOB_VARIABLES)
    return save_path.absolute() / ".spmd" / hashlib.sha256(job.encode()).hexdigest()[:12]
