"""The loop's side of the folder in which captures are asked for. Nothing in it may end or delay the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from itertools import islice
from pathlib import Path

from verl_profiling.afterwards.background import BackgroundWork
from verl_profiling.demand import (
    ANSWERS,
    CANCEL_SUFFIX,
    CONTROL,
    LOOP_NAME,
    MOST_ANSWERS,
    REQUESTS,
    Answer,
    Demand,
    LoopState,
    read_message,
    write_message,
)
from verl_profiling.errors import TraceFormatError
from verl_profiling.visible import visible

__all__ = ["ControlFolder"]

logger = logging.getLogger(__name__)

REJECTED = "rejected"
MOST_TAKEN = 64
"""How many files are looked at in one step; the others wait for the next one."""
MOST_REJECTED = 20
_MOST_STUCK = 1000
_STILL_OPEN = ".nfs"  # what NFS makes of a file that is removed while somebody on this host reads it
TIMES_A_LOOK = 50
"""How many times as long as a look takes the next one waits."""
_LOOKS = 8  # the shortest of some counts: any one may have been interrupted
_PATIENCE_S = 5.0
_LOOK_AGAIN_S = 1.0  # a file system may be late to say that a folder has changed
_GRAIN_NS = 20_000_000  # what comes right after a change may leave the same time, where times are coarse


class ControlFolder:
    """Takes requests, and leaves answers and a sign of life.

    Args:
        run: The run's folder.

    Raises:
        OSError: It cannot be set up there.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / CONTROL
        self._not_elsewhere()
        for name in (REQUESTS, ANSWERS, REJECTED):
            (self.path / name).mkdir(parents=True, exist_ok=True)
            self._not_elsewhere(name)
        self._requests = self.path / REQUESTS
        self._watched = str(self._requests)
        self._seen_ns = -1
        self._again_s = self._next_s = 0.0
        self._looks_s = deque([0.0] * _LOOKS, maxlen=_LOOKS)
        self._stuck: set[str] = set()
        self._said: set[str] = set()
        self._beats: deque[LoopState] = deque(maxlen=1)
        self._work = BackgroundWork("beat")

    def has_changed(self) -> bool:
        """Return whether something may have come: one look at the folder's time, and a real one a second.

        Where a look takes long, as over a network, it is not done in every step: all looks together take a
        fiftieth of the time at most.
        """
        begin_s = time.monotonic()
        if begin_s < self._next_s:
            return False
        try:
            changed_ns = os.stat(self._watched).st_mtime_ns  # noqa: PTH116 (each step does it)
        except OSError as error:
            self._say(f"requests for captures cannot be seen: {error}")
            return False
        now_s = time.monotonic()
        self._looks_s.append(now_s - begin_s)
        self._next_s = now_s + min(self._looks_s) * TIMES_A_LOOK
        if changed_ns == self._seen_ns and now_s < self._again_s:
            return False
        if changed_ns == self._seen_ns:
            self._again_s = now_s + _LOOK_AGAIN_S
        is_fresh = 0 <= time.time_ns() - changed_ns < _GRAIN_NS
        self._seen_ns = -1 if is_fresh else changed_ns
        return True

    def take(self) -> tuple[list[Demand], list[str]]:
        """Return the requests that came, the eldest first, and the ids of those to be cancelled."""
        demands: list[Demand] = []
        cancelled: list[str] = []
        most = MOST_TAKEN + len(self._stuck)
        try:
            with os.scandir(self._requests) as entries:
                names = [e.name for e in islice(entries, most)]
            if names:
                self._not_elsewhere(REQUESTS)
        except OSError as error:
            self._say(f"requests for captures cannot be read: {error}")
            return [], []
        if len(names) == most:  # there may be more
            self._seen_ns = -1
        for name in names:
            path = self._requests / name
            if name in self._stuck or name.startswith(_STILL_OPEN):
                self._stuck_at(name)
                continue
            if name.endswith(CANCEL_SUFFIX):
                cancelled.append(name.removesuffix(CANCEL_SUFFIX))
                self._remove(path)
                continue
            try:
                demand = read_message(path, Demand)
                if name != f"{demand.id}.json":
                    raise TraceFormatError(path, f"holds request {demand.id!r}")
            except FileNotFoundError:
                continue
            except (TraceFormatError, OSError) as error:
                self._reject(path, error)
                continue
            if self._remove(path):
                demands.append(demand)
        return sorted(demands, key=lambda demand: demand.asked_ns), cancelled

    def answer(self, answer: Answer) -> None:
        """Leave an answer."""
        folder = self.path / ANSWERS
        path = folder / f"{answer.demand.id}.json"
        try:
            self._not_elsewhere(ANSWERS)
            if not path.exists():
                self._thin_out(folder)
            write_message(path, answer)
        except OSError as error:
            self._say(f"a request for a capture cannot be answered: {error}", once="answer")

    def answers(self) -> list[Answer]:
        """Return the answers that earlier starts of the run have left."""
        found = []
        for path in self._listed(self.path / ANSWERS):
            with contextlib.suppress(TraceFormatError, OSError):
                found.append(read_message(path, Answer))
        return found

    def beat(self, state: LoopState, wait: bool = False) -> None:
        """Leave a sign of life, on a thread: the loop does not wait for the disk.

        Args:
            state: The sign.
            wait: Wait until it is there, for five seconds at most: at the begin of training and at its end.
        """
        self._beats.append(state)
        if wait or self._work.is_idle:
            self._work.submit(self._write_beat)
        if wait:
            self._work.close(_PATIENCE_S)

    def _write_beat(self) -> None:
        try:
            self._not_elsewhere()
            write_message(self.path / LOOP_NAME, self._beats.pop())
        except IndexError:  # a later one was written already
            return
        except OSError as error:
            self._say(f"nobody can see that this loop runs: {error}", once="beat")

    def _reject(self, path: Path, error: Exception) -> None:
        """Put a file aside that is no request, as long as there are few."""
        self._say("a file is no request for a capture, and is kept aside: " + str(error), once="rejected")
        aside = self.path / REJECTED
        try:
            self._not_elsewhere(REJECTED)
            if len(self._listed(aside)) < MOST_REJECTED:
                path.rename(aside / f"{time.time_ns():x}-{path.name[:100]}")
                return
        except OSError:
            pass
        self._remove(path)

    def _remove(self, path: Path) -> bool:
        """Remove a file; one that cannot be removed is not looked at again."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._say(f"a request for a capture cannot be removed, and is not looked at: {error}")
            self._stuck_at(path.name)
            return False
        return True

    def _stuck_at(self, name: str) -> None:
        if len(self._stuck) < _MOST_STUCK:
            self._stuck.add(name)

    def _thin_out(self, answers: Path) -> None:
        """Remove the eldest answers of many."""
        listed = self._listed(answers)
        for path in sorted(listed, key=_changed_ns)[: max(0, len(listed) - MOST_ANSWERS + 1)]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _listed(self, folder: Path) -> list[Path]:
        try:
            with os.scandir(folder) as entries:
                return [folder / entry.name for entry in islice(entries, 10 * MOST_ANSWERS)]
        except OSError:
            return []

    def _say(self, text: str, once: str = "") -> None:
        if (once or text) not in self._said and len(self._said) < MOST_TAKEN:
            self._said.add(once or text)
            logger.warning("%s", visible(text))

    def _not_elsewhere(self, name: str = "") -> None:
        """Raise ``OSError`` if a folder is a link: what is removed behind it would not be ours."""
        for folder in (self.path, self.path / name):
            if folder.is_symlink():
                raise NotADirectoryError(20, "is a link", str(folder))


def _changed_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
