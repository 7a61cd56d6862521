"""Limits of captures: disk, memory and timeouts; uploads; and commands that run after captures.

The groups ``limits``, ``timeouts``, ``remote`` and ``after`` of the configuration.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from verl_profiling.capture_request import Ranks, parse_ranks
from verl_profiling.errors import ConfigError
from verl_profiling.files.memory import available_bytes
from verl_profiling.typed_values import Positive, Seconds, Size
from verl_profiling.units import byte_size

EVERY_RANK = "all"
_GB = Size(1_000_000_000)
_USUAL_WORKERS_OF_A_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Disk and memory that captures may take. A size is a number of bytes, or ``2GB`` or
    ``512MiB``.

    Attributes:
        min_free_bytes: Minimum free space on a file system. With less free space, a callback or
            worker records nothing.
        keep_last: Number of captures to keep; older captures are removed. ``null``: all.
        memory_share: Share of the host's available memory for writing recordings, divided by the
            workers of the host. A recording that needs more ends with its stage or mini-batch.
    """

    min_free_bytes: Size = _GB
    keep_last: Positive | None = None
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5

    def no_room(self, folder: Path) -> str:
        """Return why an existing or planned folder has too little free space;
        empty if there is enough.
        """
        try:
            free = _free_bytes(folder)
        except OSError as error:
            return f"the free space of {folder} cannot be read: {error.strerror}"
        if free >= self.min_free_bytes:
            return ""
        return (
            f"{folder} has {byte_size(free)} of free space, less than "
            f"limits.min_free_bytes={byte_size(self.min_free_bytes)}"
        )

    def no_memory(self, needed: int, workers: int) -> str:
        """Return why a recording must end, as writing it would need too much memory; empty if it
        need not.

        Args:
            needed: The additional bytes that writing the recording needs.
            workers: Number of captured workers. This host has the number that its launcher sets,
                else at most 8 of them.
        """
        available = available_bytes()
        if available is None:
            return ""
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("RAY_LOCAL_WORLD_SIZE") or ""
        here = int(local) if local.isdecimal() else min(workers, _USUAL_WORKERS_OF_A_HOST)
        if needed <= self.memory_share * available / max(1, here):
            return ""
        divided = f", divided by {here} workers," if here > 1 else ""
        return (
            f"writing it takes about {byte_size(needed)} more memory, and "
            f"limits.memory_share={self.memory_share:g} of the free "
            f"{byte_size(available)}{divided} is less"
        )


def _free_bytes(folder: Path) -> int:
    """Return the free space for a folder, which may not exist yet;
    a folder that exists costs one call.
    """
    try:
        return shutil.disk_usage(folder).free
    except (FileNotFoundError, NotADirectoryError):
        return _free_bytes(folder.parent)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of the callback for workers, in seconds. A worker that needs longer is ``failed``.

    Attributes:
        start_s: Time for a capture to start.
        stop_s: Time for a capture to stop, including the export of the trace.
        finish_s: Time at the end of the run for workers that missed ``stop_s``, and the same time
            again for compression in the background.
    """

    start_s: Seconds = 60.0
    stop_s: Seconds = 600.0
    finish_s: Seconds = 120.0


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Uploads, where ``save_path`` is a URL.

    Attributes:
        staging: Folder on each host in which files wait for their upload; ``None``: a folder of the
            user in the system's temporary folder.
        retry_s: Seconds for which a failed upload is retried. After that, the file stays in
            ``staging``.
    """

    staging: str | None = None
    retry_s: Seconds = 60.0

    def __post_init__(self) -> None:
        if self.staging is not None and not Path(self.staging).is_absolute():
            raise ConfigError(
                "staging", f"{self.staging!r} must be an absolute path, because all hosts use it"
            )

    @property
    def staging_folder(self) -> Path:
        """The staging folder on this host."""
        return Path(
            self.staging or f"{tempfile.gettempdir()}/verl-profiling-{os.getuid()}"
        ).absolute()


@dataclass(frozen=True, kw_only=True)
class AfterHook:
    """A command that runs in the background after a capture is written.

    Attributes:
        command: Program and arguments; no shell. Environment variables describe the capture:
            ``VERL_PROFILING_FOLDER``, and likewise ``..._RUN``, ``_STEP``, ``_ROLE``, ``_RANK`` and
            ``_PID``.
        when: ``capture``: after each capture. ``last``: once, after the last capture of the
            schedule, or at the end of training.
        roles: The roles whose processes run the command. The ``controller`` (the process of the
            training loop) runs the command after the whole capture is written. A worker runs the
            command after its own artifacts are written.
        ranks: Ranks of these roles, written like ``select.ranks``. ``None``: the ranks that record.
            ``all``: also the ranks that do not record.
        timeout_s: Seconds after which the command and its child processes are terminated. It also
            begins if files of the capture are not written in this time.
    """

    command: tuple[str, ...] = ()
    when: Literal["capture", "last"] = "capture"
    roles: tuple[str, ...] = ("controller",)
    ranks: Ranks = None
    timeout_s: Seconds = 600.0

    def __post_init__(self) -> None:
        if not self.command or "\0" in "".join(self.command):
            raise ConfigError("command", "must be a list of a program and its arguments")
        if not self.roles:
            raise ConfigError("roles", "is empty; leave it out for the controller")
        if self.ranks != EVERY_RANK:
            parse_ranks(self.ranks, "ranks")

    def runs_on(self, role: str, rank: int, records: bool) -> bool:
        """Return whether a process runs the command.

        Args:
            role: Role of the process.
            rank: Rank of the process.
            records: Whether the process records.
        """
        if role not in self.roles:
            return False
        if self.ranks is None or self.ranks == EVERY_RANK:
            return records or self.ranks is not None
        return rank in (parse_ranks(self.ranks, "ranks") or ())
