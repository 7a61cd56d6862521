"""Capture requests of people: files in ``requests/`` of the run's folder, and SIGUSR2.

A local folder is read when a step begins; a folder behind a URL every 10 s, by a background thread.
No file in the folder may end or delay the loop.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from verl_profiling.capture_request import (
    REFUSED,
    REQUEST,
    REQUESTS,
    CaptureSelection,
    Demand,
    Trigger,
    new_request_id,
)
from verl_profiling.errors import ConfigError
from verl_profiling.remote import LocalFolder, RemoteFolder, is_url
from verl_profiling.settings.schedule import Schedule, StepRange
from verl_profiling.units import visible

logger = logging.getLogger(__name__)

SIGNAL = "SIGUSR2"
LIST_S = 10.0
"""How often a folder behind a URL is listed."""
_LAST_S = 5.0


@dataclass(frozen=True)
class Decision:
    """The decision to capture one or more steps.

    Attributes:
        step_range: The steps to capture.
        trigger: Who requested the capture, and why.
        selection: Overrides of the settings, e.g. other ranks; ``None`` for the settings as they are.
    """

    step_range: StepRange
    trigger: Trigger
    selection: CaptureSelection | None = None


class Requests:
    """Reads the request files of a run and SIGUSR2; decides which request gets a step.

    Args:
        schedule: The settings' schedule.
        check: Raises ``ConfigError`` for a selection that this job cannot capture.
        on_signal: Called on SIGUSR2; by default, the signal requests a capture of the next step.
    """

    def __init__(
        self,
        schedule: Schedule,
        check: Callable[[CaptureSelection], None],
        on_signal: Callable[[], object] | None = None,
    ) -> None:
        self._schedule, self._check = schedule, check
        self._on_signal = on_signal or self._ask_for_next_step
        self._came: deque[Demand] = deque()
        self._pending: list[Demand] = []
        self._decided: dict[str, Demand] = {}
        self._refusals: deque[tuple[str, str]] = deque()
        self._said: set[str] = set()
        self._folder: LocalFolder | None = None
        self._ended = threading.Event()
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
                target=self._listen, args=(f"{run}/{REQUESTS}",), name="verl-profiling-requests", daemon=True
            )
            self._thread.start()
        else:
            folder = LocalFolder(Path(run) / REQUESTS)
            folder.path.mkdir(parents=True, exist_ok=True)
            self._folder = folder

    def handle_signal(self) -> None:
        """Install the handler of SIGUSR2, on the main thread and if there is no other handler."""
        _replace_handler(signal.SIG_DFL, self._handle)

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """Return the capture of the first request that is due in a step, or ``None``.

        Args:
            step: The step.
            scheduled: Whether the schedule captures the step anyway; the request joins that capture.
        """
        came = self._take_all()
        if not (came or self._pending):
            return None
        for new in came:
            self._accept(new, step)
        for late in [one for one in self._pending if one.at is not None and one.at < step]:
            self._pending.remove(late)
            why = f"step {late.at} never came, or was part of another capture; the loop is in step {step}"
            self._refuse(late, why)
        demand = next((one for one in self._pending if self._is_due(one, step, scheduled)), None)
        if demand is None:
            return None
        last = step + demand.steps - 1 if self._schedule.continuous else step
        place, left = self._pending.index(demand), demand.steps - (last - step + 1)
        rest = [msgspec.structs.replace(demand, at=None, steps=left)] if left else []
        self._pending[place : place + 1] = rest
        selection = None if demand.selection == CaptureSelection() else demand.selection
        self._decided[demand.id] = demand
        stages = demand.selection.stages or ()
        trigger = Trigger(
            kind="demand",
            reason="as the settings say" if selection is None else selection.in_words(),
            by=demand.by,
            request=demand.id,
            stage=stages[0] if len(stages) == 1 else "",
        )
        return Decision(StepRange(step, last), trigger, selection)

    def refused(self, trigger: Trigger, why: str) -> None:
        """Refuse the request behind a capture, including its remaining steps."""
        demand = self._decided.pop(trigger.request, None)
        if demand is not None:
            self._pending = [one for one in self._pending if one.id != demand.id]
            self._refuse(demand, why)

    def end(self, why: str) -> None:
        """Refuse pending requests, and restore the default action of SIGUSR2, which ends the process."""
        for demand in [*self._pending, *self._take_all()]:
            self._refuse(demand, why)
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)
        _replace_handler(self._handle, signal.SIG_DFL)

    def _accept(self, demand: Demand, step: int) -> None:
        try:
            self._check(demand.selection)
        except ConfigError as error:
            self._refuse(demand, str(error))
            return
        if demand.at is not None and demand.at < step:
            why = f"step {demand.at} is too early: step {step} is the next that can be captured"
            self._refuse(demand, why)
            return
        logger.info("request %s of %s is accepted", demand.id, visible(demand.by) or "somebody")
        self._pending.append(demand)

    def _is_due(self, demand: Demand, step: int, scheduled: bool) -> bool:
        """Return whether a request may have this step.

        A request that overrides settings waits for an unscheduled step, unless every step is scheduled.
        """
        if demand.at is not None:
            return demand.at == step
        return not scheduled or demand.selection == CaptureSelection() or self._schedule.records_every_step

    def _refuse(self, demand: Demand, why: str) -> None:
        """Log why a request is refused, and write the reason into a file for the requester."""
        who = visible(demand.by) or "somebody"
        logger.warning("request %s of %s is refused: %s", demand.id, who, visible(why))
        if demand.by == SIGNAL:
            return
        self._refusals.append((demand.id, why))
        if self._folder is not None:
            self._write_refusals(self._folder)

    # The files.

    def _take_all(self) -> list[Demand]:
        """Return the new requests, oldest first."""
        if self._folder is not None:
            self._exchange(self._folder)
        came = [self._came.popleft() for _ in range(len(self._came))] if self._came else []
        return sorted(came, key=lambda demand: demand.asked_ns)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._on_signal()

    def _ask_for_next_step(self) -> None:
        self._came.append(Demand(id=new_request_id(), by=SIGNAL))

    def _listen(self, url: str) -> None:
        """Exchange files with a folder behind a URL, until training ends."""
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
            demand = msgspec.json.decode(data, type=Demand)
            if demand.id != request:
                raise ValueError(f"it holds request {demand.id!r}")
        except FileNotFoundError:
            pass
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._say(f"{name} is no request for a capture: {error}", once="no request")
            self._refusals.append((request, f"it is no request for a capture: {error}"))
        except Exception as error:
            self._say(f"{name} cannot be taken as a request for a capture: {error}")
        else:
            self._came.append(demand)

    def _write_refusals(self, folder: LocalFolder | RemoteFolder) -> None:
        while self._refusals:
            request, why = self._refusals.popleft()
            try:
                folder.create(f"{request}{REFUSED}", why.encode(errors="replace"))
            except Exception as error:
                self._say(f"a request for a capture cannot be answered: {error}", once="answer")

    def _say(self, text: str, once: str = "") -> None:
        if (once or text) not in self._said:
            self._said.add(once or text)
            logger.warning("%s", visible(text))


def _replace_handler(
    expected: object, handler: Callable[[int, FrameType | None], None] | signal.Handlers
) -> None:
    """Set the handler of SIGUSR2, on the main thread and if it is the expected one."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGUSR2) == expected:
        signal.signal(signal.SIGUSR2, handler)
