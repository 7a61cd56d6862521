"""Decides at the begin of a step on its capture: whether, requested by whom, and with which
settings.

The schedule, a person and the watch can request a capture; docs/watch.md has their priorities. In a
loop with several ranks, rank 0 decides on requests some steps in advance and announces the
captures. The other ranks check once a second. No rank waits: a rank that is already past the step
counts as failed.

A person requests a capture by a file in ``requests/`` of the run's folder, or by SIGUSR2. A local
folder is read when a step begins; a folder behind a URL every 10 s, by a background thread. Files
that cannot be read neither end nor delay the loop.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType

import msgspec

from verl_profiling.capture.session import process_session
from verl_profiling.capture_request import (
    REFUSED,
    REQUEST,
    REQUESTS,
    CaptureRequest,
    CaptureSelection,
    Trigger,
    new_request_id,
)
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.run import Run
from verl_profiling.controller.spmd import PROBLEMS, Ranks, find_ranks, in_a_line, place_of
from verl_profiling.controller.watch import Watch
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import LocalFolder, make_folder
from verl_profiling.files.remote import RemoteFolder, is_url
from verl_profiling.identity import WorkerIdentity, process_rank
from verl_profiling.manifest import Manifest
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Decision, Schedule, StepRange
from verl_profiling.units import visible

logger = logging.getLogger(__name__)

SIGNAL = "SIGUSR2"
LIST_S = 10.0
"""Interval (s) at which a request folder behind a URL is listed."""

_LAST_LISTING_S = 5.0  # then training ends, although the file system of the URL has not answered
_Handler = Callable[[int, FrameType | None], None]


class PersonRequests:
    """Reads the capture requests of people, and assigns steps to them.

    SIGUSR2 is handled if this is the main thread and the signal has no other handler.

    Args:
        schedule: The settings ``schedule``.
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

    @property
    def waiting(self) -> bool:
        """Whether a request waits for the begin of a step."""
        if self._came or self._pending or self._folder is None:
            return bool(self._came or self._pending)
        try:
            return any(map(_is_request, self._folder.names()))
        except OSError:  # the next step logs it
            return False

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """Return the capture of the first request that is due in a step, or ``None``.

        Args:
            step: Number of the step.
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
        """Return the capture of a request that begins with this step.

        Requested steps after the end of that capture stay pending.
        """
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

        A scheduled step is captured with the settings as they are. So a request that overrides
        settings waits for an unscheduled step, unless every step is scheduled.
        """
        return (
            not scheduled
            or demand.selection == CaptureSelection()
            or self._schedule.records_every_step
        )

    def refuse(self, request: str, by: str, why: str) -> None:
        """Refuse a capture request, or its remaining steps.

        The requester finds the reason in a file.

        Args:
            request: Id of the request.
            by: The requester, e.g. ``root@node1``, or ``SIGUSR2``, which gets no file.
            why: The reason.
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

    # The files of requests and refusals.

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
            if _is_request(name):
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


def _is_request(name: str) -> bool:
    return name.endswith(REQUEST) and not name.startswith(".")


def _replace_handler(expected: object, handler: _Handler | signal.Handlers) -> None:
    """Replace the handler of SIGUSR2 if this is the main thread
    and the handler is the expected one.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and signal.getsignal(signal.SIGUSR2) == expected:
        signal.signal(signal.SIGUSR2, handler)


_LEAST_STEPS = 2  # from announcement to capture: another rank may be in the next step already
_LEAD_S = 2.5  # from announcement to capture: ranks check for announcements once a second
_STEPS = 9  # latest begins of steps, for the median duration of a step


class Decisions:
    """Decides at the begin of each step whether the step is captured.

    Args:
        config: The callback's settings.
        roster: The callback's workers.
        watch: The watch; ``None`` if it is switched off, and then no capture can be requested.

    Attributes:
        ranks: The connection to the other ranks of the loop, if it has several.
        complete: Whether the setup before the first step is done.
    """

    def __init__(self, config: ProfilingConfig, roster: Roster, watch: Watch | None) -> None:
        self._config = config
        self._roster = roster
        self._watch = watch
        self._schedule = config.schedule
        self._words = config.schedule.in_words()
        self._requests: PersonRequests | None = None
        self._anomalies: Anomalies | None = None
        self.ranks: Ranks | None = None
        self.complete = watch is None
        self._unreached = ""
        self._agreed: dict[int, Decision] = {}
        self._step: int | None = None
        self._decided = 0
        self._begun_s: deque[float] = deque(maxlen=_STEPS)

    def begin(self, run: Run) -> None:
        """Start to accept capture requests; in a loop with several ranks, only rank 0 does."""
        if self._watch is None or self._requests is not None:
            return
        rank, ranks = place_of(self._config, self._roster.targets)
        check = partial(self._roster.check_request, ranks=ranks if ranks > 1 else None)
        self._requests = PersonRequests(self._schedule, check, _refer_to_rank_0 if rank else None)
        if rank:
            return
        if self._config.watch.trigger is not None:
            self._anomalies = Anomalies(self._config.watch.trigger, check, self._watch.recorders)
            self._watch.listeners.append(self._anomalies.listen)
        try:
            place = run.place.url or run.place.path
            self._watch.log_into(run.path, run.publish)
            self._requests.open(place)
        except OSError as error:
            logger.warning(
                "the run's folder takes no log of steps and no capture requests: %s", error
            )
        else:
            logger.info("request captures with verl-profiling trigger %s or SIGUSR2", place)

    @property
    def requested(self) -> bool:
        """Whether a capture request of a person waits for the begin of a step."""
        return self._requests is not None and self._requests.waiting

    def find_ranks(self) -> bool:
        """Find the other ranks that run this loop, if any, so that all capture the same steps.

        Returns:
            Whether this process can be captured; else the reason is logged once.
        """
        if self.ranks is None and (self._config.spmd or process_rank() is not None):
            self.ranks, why = find_ranks(self._config, self._roster.targets)
            if why and not self._unreached:
                logger.error("%s", why)
            self._unreached = why
            if self.ranks is not None and self._watch is not None:
                role = next((target.roles[0] for target in self._roster.driven(None)), "controller")
                rank, _ = process_rank() or (0, 1)
                identity = process_session().identity or WorkerIdentity(role=role, rank=rank)
                self._watch.begin_with(self.ranks, identity)
        self.complete = self._watch is None or not self._unreached
        return not self._unreached

    def end(self, ran: list[int]) -> None:
        """Refuse pending capture requests, and accept no new ones until training begins again.

        Args:
            ran: The first and the last step of the loop; empty without steps.
        """
        if self._requests is not None:
            self._requests.end(f"training ended after step {ran[1]}" if ran else "training ended")
        if self._watch is not None and self._anomalies is not None:
            self._watch.listeners.remove(self._anomalies.listen)
        self._requests = self._anomalies = None
        self.complete = self._watch is None

    def leave_ranks(self) -> None:
        """Disconnect from the other ranks of the loop, at the end of training."""
        if self.ranks is not None:
            self.ranks.end()
            self.ranks = None

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, or ``None``.

        Args:
            step: Number of the step.
            goes_on: Whether an open capture also covers this step, so that no other capture begins.
        """
        if self._anomalies is not None:
            self._anomalies.step_begins(step)
        if self.ranks is not None:
            self._agree(self.ranks, step)
        if goes_on:
            return None
        scheduled = self._schedule.step_range(step)
        requested = self._requested(step) if self.ranks is None else self._agreed.pop(step, None)
        if scheduled is None:
            return requested
        if requested is None:
            return Decision(scheduled, Trigger(reason=self._words))
        if requested.selection or scheduled.action is not Action.RECORD:
            return requested
        reason = f"{self._words}; besides {requested.trigger.in_words()}"
        trigger = msgspec.structs.replace(requested.trigger, kind="schedule", reason=reason)
        return Decision(scheduled, trigger)

    def refused(self, trigger: Trigger, why: str) -> None:
        """Report a refused capture to its requester: the limits leave no room,
        or the capture failed.
        """
        if self._requests is not None and trigger.request:
            self._requests.refuse(trigger.request, trigger.by, why)

    def concluded(self, manifest: Manifest) -> None:
        """Record that a capture has ended; if the watch requested it, its cooldown begins."""
        if self._anomalies is not None:
            self._anomalies.concluded(manifest)

    def _requested(self, step: int) -> Decision | None:
        """Return the requested capture of a step, or ``None``;
        a person's request precedes the watch's.
        """
        scheduled = self._schedule.action(step) is Action.RECORD
        for source in (self._requests, self._anomalies):
            if source is not None and (decision := source.asks(step, scheduled)):
                return decision
        return None

    def _agree(self, ranks: Ranks, step: int) -> None:
        """Announce requested captures of later steps (rank 0),
        or receive announcements (other ranks).
        """
        if ranks.leads:
            self._look_ahead(ranks, step)
        self._agreed |= {decision.step_range.first: decision for decision in ranks.announced()}
        for missed in [agreed for agreed in self._agreed if agreed < step]:
            decision = self._agreed.pop(missed)
            if ranks.leads:
                self.refused(
                    decision.trigger, f"step {missed} never came, or was part of another capture"
                )
                continue
            logger.warning(
                "rank %d was past step %d when rank 0's capture request arrived; this rank "
                "is not captured",
                ranks.rank,
                missed,
            )

    def _look_ahead(self, ranks: Ranks, step: int) -> None:
        """Decide on captures of later steps, so early that the announcement reaches every rank."""
        self._begun_s.append(time.monotonic())
        if self._step is None or step < self._step:  # the loop restarted its step numbers
            self._decided = step
        self._step = step
        times_s = [end_s - begin_s for begin_s, end_s in pairwise(self._begun_s)]
        usual_s = max(median(times_s or [_LEAD_S]), 0.001)
        last = step + _LEAST_STEPS + math.ceil(_LEAD_S / usual_s)
        for first in range(max(step + _LEAST_STEPS, self._decided + 1), last + 1):
            if first > self._decided and first not in self._agreed:
                self._decide(ranks, first)
            self._decided = max(self._decided, first)

    def _decide(self, ranks: Ranks, step: int) -> None:
        """Announce the requested capture of a later step, if there is one."""
        decision = self._requested(step)
        if decision is None:
            return
        try:
            ranks.announce(decision)
            self._agreed[step] = decision
        except PROBLEMS as error:
            why = f"step {step} cannot be announced to the other ranks: {in_a_line(error)}"
            self.refused(decision.trigger, why)
        self._decided = decision.step_range.last


def _refer_to_rank_0(*_: object) -> None:
    logger.warning("SIGUSR2: rank 0 decides on captures; send the signal to its process")
