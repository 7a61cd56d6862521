"""The capture requests of people: files in ``requests/`` of the run's folder, and SIGUSR2.

A local folder is read when a step begins; a folder behind a URL every 10 s, by a background thread.
Files that cannot be read neither end nor delay the loop.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from verl_profiling.capture_request import (
    REFUSED,
    REQUEST,
    REQUESTS,
    CaptureRequest,
    CaptureSelection,
    Trigger,
    new_request_id,
)
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import make_folder
from verl_profiling.files.remote import LocalFolder, RemoteFolder, is_url
from verl_profiling.settings.schedule import Decision, Schedule, StepRange
from verl_profiling.units import visible

logger = logging.getLogger(__name__)

SIGNAL = "SIGUSR2"
LIST_S = 10.0
"""How often a folder behind a URL is listed."""

_LAST_LISTING_S = 5.0  # at the end of training, a store that does not answer is left
_Handler = Callable[[int, FrameType | None], None]


class PersonRequests:
    """Reads the capture requests of people, and assigns steps to them.

    SIGUSR2 is handled if this is the main thread and the signal has no other handler.

    Args:
        schedule: The settings' schedule.
        check: Raises ``ConfigError`` for a selection that this job cannot capture.
        on_signal: Handler of SIGUSR2; by default, the signal requests a capture of the next step.
    """

    def __init__(
        self,
        schedule: Schedule,
        check: Callable[[CaptureSelection], None],
        on_signal: _Handler | None = None,
    ) -> None:
        self._schedule = schedule
        self._check = check
        self._on_signal = on_signal or self._ask_for_next_step
        _replace_handler(signal.SIG_DFL, self._on_signal)
        self._came: deque[CaptureRequest] = deque()
        self._pending: list[CaptureRequest] = []
        self._refusals: deque[tuple[str, str]] = deque()
        self._said: set[str] = set()
        self._folder: LocalFolder | None = None
        self._ended = threading.Event()
        self._why = ""
        self._thread: threading.Thread | None = None

    def open(self, run: str) -> None:
        """Start to read the request files of a run.

        Args:
            run: Folder or URL of the run.

        Raises:
            OSError: The folder cannot be created.
        """
        if is_url(run):
            self._thread = threading.Thread(
                target=self._listen,
                args=(f"{run}/{REQUESTS}",),
                name="verl-profiling-requests",
                daemon=True,
            )
            self._thread.start()
        else:
            folder = LocalFolder(Path(run) / REQUESTS)
            make_folder(folder.path)
            self._folder = folder

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """Return the capture of the first request that is due in a step, or ``None``.

        Args:
            step: The step.
            scheduled: Whether the schedule captures the step anyway; the request then joins the
                scheduled capture.
        """
        came = self._take_all()
        if not (came or self._pending):
            return None
        for new in came:
            self._accept(new)
        for demand in self._pending:
            if self._is_due(demand, scheduled):
                return self._served(demand, step, scheduled)
        return None

    def _served(self, demand: CaptureRequest, step: int, scheduled: bool) -> Decision:
        """Return the capture that serves a request from this step on; the rest stays pending."""
        last = step + demand.steps - 1 if self._schedule.continuous else step
        if scheduled and (step_range := self._schedule.step_range(step)):
            last = min(last, step_range.last)
        place = self._pending.index(demand)
        left = demand.steps - (last - step + 1)
        if left:
            self._pending[place] = msgspec.structs.replace(demand, steps=left)
        else:
            del self._pending[place]
        selection: CaptureSelection | None = demand.selection
        reason = demand.selection.in_words()
        if selection == CaptureSelection():
            selection = None
            reason = "with the settings of the run"
        stages = demand.selection.stages or ()
        trigger = Trigger(
            kind="demand",
            reason=reason,
            by=demand.by,
            request=demand.id,
            stage=stages[0] if len(stages) == 1 else "",
        )
        return Decision(StepRange(step, last), trigger, selection)

    def end(self, why: str) -> None:
        """Refuse pending requests, and restore the default action of SIGUSR2,
        which ends the process.
        """
        self._why = why  # for the thread, which may still read requests
        for demand in [*self._pending, *self._take_all()]:
            self.refuse(demand.id, demand.by, why)
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LAST_LISTING_S)
        _replace_handler(self._on_signal, signal.SIG_DFL)

    def _accept(self, demand: CaptureRequest) -> None:
        try:
            self._check(demand.selection)
        except ConfigError as error:
            self.refuse(demand.id, demand.by, str(error))
            return
        logger.info("request %s of %s is accepted", demand.id, visible(demand.by) or "somebody")
        self._pending.append(demand)

    def _is_due(self, demand: CaptureRequest, scheduled: bool) -> bool:
        """Return whether this step can serve a request.

        A request that overrides settings waits for an unscheduled step, unless every step is
        scheduled.
        """
        return (
            not scheduled
            or demand.selection == CaptureSelection()
            or self._schedule.records_every_step
        )

    def refuse(self, request: str, by: str, why: str) -> None:
        """Refuse a request with all remaining steps,
        and write the reason into a file for the requester.
        """
        self._pending = [demand for demand in self._pending if demand.id != request]
        logger.warning(
            "request %s of %s is refused: %s", request, visible(by) or "somebody", visible(why)
        )
        if by == SIGNAL:
            return
        self._refusals.append((request, why))
        if self._folder is not None:
            self._write_refusals(self._folder)

    # The files.

    def _take_all(self) -> list[CaptureRequest]:
        """Return the new requests, oldest first."""
        if self._folder is not None:
            self._exchange(self._folder)
        came = []
        while self._came:
            came.append(self._came.popleft())
        return sorted(came, key=lambda demand: demand.request_ns)

    def _ask_for_next_step(self, *_: object) -> None:
        self._came.append(CaptureRequest(id=new_request_id(), by=SIGNAL))

    def _listen(self, url: str) -> None:
        """Read requests from a folder behind a URL and write refusals there,
        until training ends.
        """
        ended = False
        while not ended:
            ended = self._ended.wait(LIST_S)
            self._exchange(url)

    def _exchange(self, place: LocalFolder | str) -> None:
        try:
            folder = RemoteFolder(place) if isinstance(place, str) else place
            names = folder.names()
        except Exception as error:  # each file system raises errors of its own
            self._say(f"requests for captures cannot be read: {type(error).__name__}: {error}")
            return
        for name in names:
            if name.endswith(REQUEST) and not name.startswith("."):
                self._take(folder, name)
        self._write_refusals(folder)

    def _take(self, folder: LocalFolder | RemoteFolder, name: str) -> None:
        request = name.removesuffix(REQUEST)
        try:
            data = folder.read(name)
            folder.remove(name)
            demand = msgspec.json.decode(data, type=CaptureRequest)
            if demand.id != request:
                raise ValueError(f"the file holds request {demand.id!r}")
        except FileNotFoundError:
            pass
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._say(f"{name} is no request for a capture: {error}", once="no request")
            self._refusals.append((request, f"the file is no request for a capture: {error}"))
        except Exception as error:
            self._say(f"{name} cannot be read as a request for a capture: {error}")
        else:
            if self._why:
                self.refuse(demand.id, demand.by, self._why)
            else:
                self._came.append(demand)

    def _write_refusals(self, folder: LocalFolder | RemoteFolder) -> None:
        while self._refusals:
            request, why = self._refusals.popleft()
            try:
                folder.create(f"{request}{REFUSED}", why.encode(errors="replace"))
            except Exception as error:
                self._say(
                    f"the refusal of a capture request cannot be written: {error}", once="answer"
                )

    def _say(self, text: str, once: str = "") -> None:
        if (once or text) not in self._said:
            self._said.add(once or text)
            logger.warning("%s", visible(text))


def _replace_handler(expected: object, handler: _Handler | signal.Handlers) -> None:
    """Replace the handler of SIGUSR2 if this is the main thread
    and the handler is the expected one.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGUSR2) == expected:
        signal.signal(signal.SIGUSR2, handler)
