"""Reaches a running job through the folder of its run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

from verl_profiling.demand import (
    ANSWERS,
    CANCEL_SUFFIX,
    CONTROL,
    LOOP_NAME,
    REQUESTS,
    Answer,
    Demand,
    LoopState,
    read_message,
    write_message,
)
from verl_profiling.errors import TraceFormatError

__all__ = ["FolderLine"]

Listed = TypeVar("Listed", Demand, Answer)


class FolderLine:
    """See :class:`~verl_profiling.commands.asking.Line`.

    Args:
        run: The run's folder.
    """

    ends_with_job = False

    def __init__(self, run: Path) -> None:
        self.place = str(run)
        self._control = run / CONTROL

    def state(self) -> LoopState | None:
        """See :meth:`Line.state`."""
        try:
            return read_message(self._control / LOOP_NAME, LoopState)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def ask(self, demand: Demand) -> None:
        """See :meth:`Line.ask`."""
        requests = self._requests()
        write_message(requests / f"{demand.id}.json", demand, beside=self._control)

    def cancel(self, request: str) -> None:
        """See :meth:`Line.cancel`."""
        (self._requests() / f"{request}{CANCEL_SUFFIX}").touch()

    def answer(self, request: str) -> Answer | None:
        """See :meth:`Line.answer`."""
        if "/" in request or request.startswith("."):
            return None
        path = self._control / ANSWERS / f"{request}.json"
        with contextlib.suppress(FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                return read_message(path, Answer)
            with os.scandir(path.parent):  # opened, or NFS remembers that none was there
                return read_message(path, Answer)
        return None

    def answers(self) -> list[Answer]:
        """See :meth:`Line.answers`."""
        return _listed(self._control / ANSWERS, Answer)

    def waiting(self) -> list[Demand]:
        """See :meth:`Line.waiting`."""
        return _listed(self._control / REQUESTS, Demand)

    def _requests(self) -> Path:
        """Return the folder to write to, which leads nowhere else."""
        requests = self._control / REQUESTS
        for folder in (self._control, requests):
            if folder.is_symlink():
                raise TraceFormatError(folder, "is a link")
        return requests


def _listed(folder: Path, kind: type[Listed]) -> list[Listed]:
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(TraceFormatError, OSError):
            found.append(read_message(path, kind))
    return found
