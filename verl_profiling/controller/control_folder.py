"""The loop's side of the folder in which captures are asked for. Nothing in it may end or delay the loop."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from itertools import islice
from pathlib import Path

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

__all__ = ["ControlFolder"]

logger = logging.getLogger(__name__)

REJECTED = "rejected"
MOST_TAKEN = 64
"""How many files are looked at in one step; the others wait for the next one."""
MOST_REJECTED = 20
MOST_ANSWERS = 200
_MOST_STUCK = 1000
_LOOK_AGAIN_S = 1.0  # a file system may be late to say that a folder has changed, or tell times coarsely


class ControlFolder:
    """Takes requests, and leaves answers and a sign of life.

    Args:
        run: The run's folder.

    Raises:
        OSError: It cannot be set up there.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / CONTROL
        if self.path.is_symlink():
            raise NotADirectoryError(20, "is a link", str(self.path))
        for name in (REQUESTS, ANSWERS, REJECTED):
            (self.path / name).mkdir(parents=True, exist_ok=True)
            if (self.path / name).is_symlink():
                raise NotADirectoryError(20, "is a link", str(self.path / name))
        self._requests = self.path / REQUESTS
        self._watched = str(self._requests)
        self._seen_ns = -1
        self._again_s = 0.0
        self._stuck: set[str] = set()
        self._said: set[str] = set()
        self._beat: LoopState | None = None
        self._beating: threading.Thread | None = None
        self._lock = threading.Lock()

    def has_changed(self) -> bool:
        """Return whether something may have come: one look at the folder's time, and a real one a second."""
        try:
            changed_ns = os.stat(self._watched).st_mtime_ns  # noqa: PTH116 (each step does it)
        except OSError as error:
            self._say(f"requests for captures cannot be seen: {error}")
            return False
        now_s = time.monotonic()
        if changed_ns == self._seen_ns and now_s < self._again_s:
            return False
        if changed_ns == self._seen_ns:
            self._again_s = now_s + _LOOK_AGAIN_S
        self._seen_ns = changed_ns
        return True

    def take(self) -> tuple[list[Demand], list[str]]:
        """Return the requests that came, the eldest first, and the ids of those to be cancelled."""
        demands: list[Demand] = []
        cancelled: list[str] = []
        try:
            with os.scandir(self._requests) as entries:
                names = [e.name for e in islice(entries, MOST_TAKEN + len(self._stuck))]
        except OSError as error:
            self._say(f"requests for captures cannot be read: {error}")
            return [], []
        if len(names) > MOST_TAKEN:
            self._seen_ns = -1
        for name in names:
            path = self._requests / name
            if name in self._stuck:
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
            if not path.exists():
                self._thin_out(folder)
            write_message(path, answer)
        except OSError as error:
            self._say(f"a request for a capture cannot be answered: {error}")

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
            wait: Wait until it is there: at the begin of training and at its end.
        """
        with self._lock:
            self._beat, writer = state, self._beating
            if writer is None:
                name = "verl-profiling-beat"
                self._beating = threading.Thread(target=self._write_beats, name=name, daemon=True)
                try:
                    self._beating.start()
                except RuntimeError:  # the interpreter is shutting down, and starts no thread
                    self._beating, wait = None, False
                    self._write_beat(state)
                writer = self._beating
        if wait and writer is not None:
            writer.join()

    def _write_beats(self) -> None:
        while True:
            with self._lock:
                state, self._beat = self._beat, None
                if state is None:
                    self._beating = None
                    return
            self._write_beat(state)

    def _write_beat(self, state: LoopState) -> None:
        try:
            write_message(self.path / LOOP_NAME, state)
        except OSError as error:
            self._say(f"nobody can see that this loop runs: {error}")

    def _reject(self, path: Path, error: Exception) -> None:
        """Put a file aside that is no request, as long as there are few."""
        self._say("a file is no request for a capture, and is kept aside: " + str(error), once="rejected")
        aside = self.path / REJECTED
        try:
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
            if len(self._stuck) < _MOST_STUCK:
                self._stuck.add(path.name)
            return False
        return True

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
            logger.warning("%s", text)


def _changed_ns(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
