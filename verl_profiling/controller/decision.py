"""Decides at the begin of a step on its capture: whether, requested by whom, and with which
settings.

The schedule, a person and the watch can request a capture; docs/watch.md has their priorities. In a
loop with several ranks, rank 0 decides on requests some steps in advance and announces the
captures. The other ranks check once a second. No rank waits: a rank that is already past the step
counts as failed.

A person's request is a file in ``requests/`` of the run's folder, or SIGUSR2. A local folder is
read when a step begins; a folder behind a URL every 10 s, by a background thread. Files that cannot
be read neither end nor delay the loop.

:class:`LoopOrder` checks in every step the order in which the loop calls the hooks.
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
    CaptureSelection,
    Demand,
    Trigger,
    new_request_id,
)
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.run import Run
from verl_profiling.controller.spmd import (
    PROBLEMS,
    Decision,
    Ranks,
    find_ranks,
    in_a_line,
    place_of,
)
from verl_profiling.controller.targets import Roster
from verl_profiling.controller.watch import Watch
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import make_folder
from verl_profiling.files.remote import LocalFolder, RemoteFolder, is_url
from verl_profiling.identity import WorkerIdentity, process_rank
from verl_profiling.manifest import Manifest
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.schedule import Action, Schedule, StepRange
from verl_profiling.units import step_list, visible

logger = logging.getLogger(__name__)

SIGNAL = "SIGUSR2"
LIST_S = 10.0
"""How often a folder behind a URL is listed."""
_Handler = Callable[[int, FrameType | None], None]
_LAST_S = 5.0
_LEAST_STEPS = 2
_LEAD_S = 2.5
_STEPS = 9


class Decisions:
    """Decides at the begin of each step whether the step is captured.

    Args:
        config: The settings.
        roster: The workers.
        watch: The watch; ``None`` if switched off, together with capture requests.

    Attributes:
        ranks: The ranks of the loop, if it has several.
        complete: Whether the setup before the first step is done.
    """

    def __init__(self, config: ProfilingConfig, roster: Roster, watch: Watch | None) -> None:
        self._config, self._roster, self._watch = config, roster, watch
        self._schedule = config.schedule
        self._words = config.schedule.in_words()
        self._requests: Requests | None = None
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
        self._requests = Requests(self._schedule, check, _refer_to_rank_0 if rank else None)
        if rank:
            return
        if self._config.watch.trigger is not None:
            self._anomalies = Anomalies(self._config.watch.trigger, check, self._watch.recorders)
            self._watch.listeners.append(self._anomalies.listen)
        try:
            place = run.place.url or run.place.path
            self._watch.log_into(run.path)
            self._requests.open(place)
        except OSError as error:
            logger.warning(
                "the run's folder takes no log of steps and no capture requests: %s", error
            )
        else:
            logger.info("request captures with verl-profiling trigger %s or SIGUSR2", place)

    def find_ranks(self) -> bool:
        """Find the other ranks of the loop, if there are any, for common decisions.

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
                own = WorkerIdentity(role=role, rank=(process_rank() or (0, 1))[0])
                self._watch.begin_with(self.ranks, process_session().identity or own)
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

    def at(self, step: int, goes_on: bool) -> Decision | None:
        """Return the capture that begins with a step, or ``None``.

        Args:
            step: The step.
            goes_on: Whether an open capture also covers this step, so that no other capture begins.
        """
        if self._anomalies is not None:
            self._anomalies.step_begins(step)
        if self.ranks is not None:
            self._agree(self.ranks, step)
        if goes_on:
            return None
        found = self._schedule.step_range(step)
        asked = self._asked(step) if self.ranks is None else self._agreed.pop(step, None)
        if found is None or (asked and (asked.selection or found.action is not Action.RECORD)):
            return asked
        trigger = Trigger(reason=self._words)
        if asked is not None:
            reason = f"{self._words}; besides {asked.trigger.in_words()}"
            trigger = msgspec.structs.replace(asked.trigger, kind="schedule", reason=reason)
        return Decision(found, trigger)

    def refused(self, trigger: Trigger, why: str) -> None:
        """Report a refused capture to its requester: the limits leave no room,
        or the capture failed.
        """
        if self._requests is not None and trigger.request:
            self._requests.refuse(trigger.request, trigger.by, why)

    def concluded(self, manifest: Manifest) -> None:
        """Record that a capture has ended: the cooldown of the watch begins."""
        if self._anomalies is not None:
            self._anomalies.concluded(manifest)

    def _asked(self, step: int) -> Decision | None:
        """Return the requested capture of a step, or ``None``;
        a person's request precedes the watch's.
        """
        scheduled = self._schedule.action(step) is Action.RECORD
        asked = self._requests.asks(step, scheduled) if self._requests is not None else None
        if asked is None and self._anomalies is not None:
            asked = self._anomalies.asks(step, scheduled)
        return asked

    def _agree(self, ranks: Ranks, step: int) -> None:
        """Announce requested captures of later steps (rank 0),
        or receive announcements (other ranks).
        """
        if ranks.leads:
            self._look_ahead(ranks, step)
        self._agreed |= {decision.step_range.first: decision for decision in ranks.announced()}
        for missed in [one for one in self._agreed if one < step]:
            decision = self._agreed.pop(missed)
            if ranks.leads:
                self.refused(
                    decision.trigger, f"step {missed} never came, or was part of another capture"
                )
                continue
            logger.warning(
                "rank %d was past step %d when rank 0's capture request arrived; this rank "
                "is not captured",
                *(ranks.rank, missed),
            )

    def _look_ahead(self, ranks: Ranks, step: int) -> None:
        """Decide on captures of later steps, early enough for the announcement
        to reach every rank.
        """
        self._begun_s.append(time.monotonic())
        if self._step is None or step < self._step:  # the loop restarted its step numbers
            self._decided = step
        self._step = step
        times_s = [end_s - begin_s for begin_s, end_s in pairwise(self._begun_s)]
        usual_s = max(median(times_s or [_LEAD_S]), 0.001)
        last = step + _LEAST_STEPS + math.ceil(_LEAD_S / usual_s)
        for first in range(max(step + _LEAST_STEPS, self._decided + 1), last + 1):
            if (
                first > self._decided
                and first not in self._agreed
                and (decision := self._asked(first))
            ):
                try:
                    ranks.announce(decision)
                    self._agreed[first] = decision
                except PROBLEMS as error:
                    why = f"step {first} cannot be announced to the other ranks: {in_a_line(error)}"
                    self.refused(decision.trigger, why)
                self._decided = decision.step_range.last
            self._decided = max(self._decided, first)


class LoopOrder:
    """Tracks the steps and rollouts that the loop has begun and ended.

    Attributes:
        in_step: Whether a step has begun and not ended.
        in_rollout: Whether generation has begun and not ended.
        is_shared: Whether another callback's loop began in this step; if the step then ends, both
            loops run.
        steps: The first and the last step that the loop began; empty before the first one.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.in_step = False
        self.in_rollout = False
        self.is_shared = False
        self._newest: int | None = None
        self._rises = True
        self._captured: set[int] = set()
        self._said: set[str] = set()

    def step_begins(self, step: int, captured: bool) -> None:
        """Record the begin of a step; warn if the last step has not ended,
        or the number does not rise.
        """
        if self.in_step:
            self._say(
                "step %d begins and step %s has not ended: call on_step_end() last in every "
                "step, or "
                "on_exception(error) where it raised",
                *(step, self._newest),
            )
        if self._rises and self._newest is not None and step <= self._newest:
            self._rises = False
            logger.warning(
                "step %d begins after step %d: pass on_step_begin(step) a number that rises "
                "over the whole "
                "training, not over an epoch; the schedule chooses steps by it",
                *(step, self._newest),
            )
        self.in_step, self._newest = True, step
        self.is_shared = False
        if self.steps:
            self.steps[1] = step
        else:
            self.steps = [step, step]
        if captured:
            self._captured.add(step)

    def step_ends(self) -> None:
        """Record the end of a step; warn of one without a begin,
        and of one in which another loop began.
        """
        if not self.in_step:
            self._say(
                "on_step_end without on_step_begin: nothing ends; call on_step_begin(step) first"
            )
        elif self.is_shared:
            self._say(
                "two callbacks of this process are in a step at the same time, and a process "
                "is recorded by "
                "one: call the hooks of one callback only"
            )
        self.in_step = False

    def rollout_without_begin(self) -> None:
        """Warn of the end of a rollout without a begin."""
        self._say(
            "on_rollout_end without on_rollout_begin: the rollout has no begin and is in no "
            "timeline; "
            "call on_rollout_begin() before generation"
        )

    def is_left(self) -> None:
        """Record that the loop raised or ended; the next loop may begin with any step."""
        self.in_step, self._newest = False, None

    def train_ends(self, schedule: Schedule, resumes: bool) -> list[int]:
        """Warn of scheduled steps that never began; return those in ``schedule.steps``.

        Args:
            schedule: The steps to capture.
            resumes: Whether an earlier run of the same name may have run the steps before this
                run's first step.
        """
        if not self.steps:
            self._say(
                "training ends and on_step_begin(step) was never called: nothing was captured"
            )
            return []
        ran = "the loop ran from step {} to step {}".format(*self.steps)
        listed = [step for step in schedule.steps or () if step not in self._captured]
        first = self.steps[0] if resumes else None
        never = [step for step in listed if first is None or step >= first]
        if never:
            self._say(f"schedule.steps: {step_list(never)} never came; {ran}")
        elif not self._captured and not listed and schedule.steps != ():
            self._say(f"schedule: no step was captured; {ran}, and {schedule.in_words()}")
        return never

    def _say(self, text: str, *arguments: object) -> None:
        """Log a warning, once for each text."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text, *arguments)


class Requests:
    """Reads the capture requests of people, from files and SIGUSR2, and assigns steps to them.

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
        self._schedule, self._check = schedule, check
        self._on_signal = on_signal or self._ask_for_next_step
        _replace_handler(signal.SIG_DFL, self._on_signal)
        self._came: deque[Demand] = deque()
        self._pending: list[Demand] = []
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
        demand = next((one for one in self._pending if self._is_due(one, scheduled)), None)
        if demand is None:
            return None
        last = step + demand.steps - 1 if self._schedule.continuous else step
        if scheduled and (own := self._schedule.step_range(step)):
            last = min(last, own.last)
        place, left = self._pending.index(demand), demand.steps - (last - step + 1)
        rest = [msgspec.structs.replace(demand, steps=left)] if left else []
        self._pending[place : place + 1] = rest
        selection = None if demand.selection == CaptureSelection() else demand.selection
        stages = demand.selection.stages or ()
        trigger = Trigger(
            kind="demand",
            reason="with the settings of the run" if selection is None else selection.in_words(),
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
            self._thread.join(_LAST_S)
        _replace_handler(self._on_signal, signal.SIG_DFL)

    def _accept(self, demand: Demand) -> None:
        try:
            self._check(demand.selection)
        except ConfigError as error:
            self.refuse(demand.id, demand.by, str(error))
            return
        logger.info("request %s of %s is accepted", demand.id, visible(demand.by) or "somebody")
        self._pending.append(demand)

    def _is_due(self, demand: Demand, scheduled: bool) -> bool:
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
        self._pending = [one for one in self._pending if one.id != request]
        logger.warning(
            "request %s of %s is refused: %s", request, visible(by) or "somebody", visible(why)
        )
        if by == SIGNAL:
            return
        self._refusals.append((request, why))
        if self._folder is not None:
            self._write_refusals(self._folder)

    # The files.

    def _take_all(self) -> list[Demand]:
        """Return the new requests, oldest first."""
        if self._folder is not None:
            self._exchange(self._folder)
        came = [self._came.popleft() for _ in range(len(self._came))] if self._came else []
        return sorted(came, key=lambda demand: demand.asked_ns)

    def _ask_for_next_step(self, *_: object) -> None:
        self._came.append(Demand(id=new_request_id(), by=SIGNAL))

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
            demand = msgspec.json.decode(data, type=Demand)
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


def _refer_to_rank_0(*_: object) -> None:
    logger.warning("SIGUSR2: rank 0 decides on captures; send the signal to its process")
