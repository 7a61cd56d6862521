"""Requests a capture when the watch, which times every step, detects an anomaly.

An anomaly is, for example, a stage that takes longer than in earlier steps. The capture is of a
later step, and of the suspected workers only, if there are any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec.structs import replace

from verl_profiling.capture_request import CaptureSelection
from verl_profiling.controller.watch import LOOP
from verl_profiling.errors import ConfigError
from verl_profiling.files.step_summary import ROLLOUT, RankUse, StepSummary
from verl_profiling.files.watch_signs import sign_of
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import Manifest
from verl_profiling.settings.config import Anomaly
from verl_profiling.settings.schedule import Decision, StepRange
from verl_profiling.watch.collectives import ASKED_STEPS, RecorderReading
from verl_profiling.watch.sign_tests import Detector
from verl_profiling.watch.suspicion import Suspicion

logger = logging.getLogger(__name__)

READ_S = 10.0
"""Least time (s) for which a capture waits for torch's flight recorders to show the slow process.
Workers are read once a second at most.
"""

T = TypeVar("T")


class Anomalies:
    """Requests a capture when the watch detects an anomaly.

    Args:
        options: The settings ``watch.trigger``.
        check: Raises ``ConfigError`` for a selection that this job cannot capture.
        recorders: Torch's flight recorders, read if a stage became slow and no process was slower
            than the others.
    """

    def __init__(
        self,
        options: Anomaly,
        check: Callable[[CaptureSelection], None],
        recorders: RecorderReading,
    ) -> None:
        self._options = options
        self._check = check
        self._recorders = recorders
        self._detector = Detector(options)
        self._noticed: Suspicion | None = None
        self._noticed_s = 0.0
        self._listened = 0
        self._waits = ""
        self._made = 0
        self._captured: int | None = None
        self._requested: dict[int, Suspicion] = {}
        self._coming: int | None = None
        self._begun = 0
        self._uses: dict[str, RankUse] = {}

    def listen(self, summary: StepSummary) -> None:
        """Search a step summary for an anomaly; called on the watch's thread."""
        summary.waits = self._waits
        self._listened += 1
        if summary.captured:
            self._compare(summary)
        else:
            self._search_suspects(summary)
        suspicion = self._detector.observe(summary)
        if suspicion is None:
            return
        logger.warning("watch: %s", suspicion.reason)
        summary.noticed = suspicion.trigger()
        if suspicion.is_over:
            return
        summary.waits = self._refusal(summary.step + 1)
        if suspicion.stage and not suspicion.suspects:
            self._recorders.begin()
        self._keep(suspicion, summary)

    def _search_suspects(self, summary: StepSummary) -> None:
        """Look in a later step for the suspected processes of an anomaly that has none yet."""
        noticed = self._noticed
        if noticed is None or noticed.suspects or not noticed.stage:
            return
        named = noticed.named_in(summary)
        if self._noticed is not noticed:  # its capture has begun meanwhile
            return
        self._noticed = named
        if named.suspects:
            self._detector.is_named(named, summary)
            logger.warning("watch: %s", named.reason)
            summary.noticed = named.trigger()
            self._uses = {use.lane: use for use in summary.processes}

    def _keep(self, suspicion: Suspicion, summary: StepSummary) -> None:
        """Keep an anomaly until its capture begins.

        A later anomaly replaces it if only the later one has suspects, or if the limits of the
        trigger (``_refusal``) delay the capture.
        """
        noticed = self._noticed
        if noticed is not None:
            if not self._waits and (noticed.suspects or not suspicion.suspects):
                return
            if self._waits:
                logger.warning(
                    "watch: it takes the place of the anomaly of step %s", noticed.noticed
                )
        self._noticed = suspicion
        self._waits = ""
        self._noticed_s = time.monotonic()
        self._listened = 0
        self._uses = {use.lane: use for use in summary.processes}

    def step_begins(self, step: int) -> None:
        """Record the begin of a step; called for every step,
        also inside a capture of several steps.
        """
        if step < self._begun:  # the loop restarted its step numbers
            self._coming = self._captured = None
        self._begun = step
        if self._coming is not None and step > self._coming:
            self._coming = None

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        """Return the capture of a step that an anomaly requests, or ``None``.

        The limits of the trigger, such as ``max_captures``, do not apply to a ``scheduled`` step,
        which is captured anyway.
        """
        noticed = self._noticed
        if noticed is None or self._coming is not None or self._is_read_further(noticed):
            return None
        if not scheduled and (why := self._refusal(step)):
            if not self._waits:
                logger.warning(
                    "watch: the anomaly of step %s is not captured yet: %s", noticed.noticed, why
                )
            self._waits = why
            return None
        self._noticed = None
        self._waits = ""
        self._coming = step
        self._requested = {step: noticed}
        return Decision(
            StepRange(step, step),
            noticed.trigger(),
            None if scheduled else self._selection(noticed),
        )

    def concluded(self, manifest: Manifest) -> None:
        """Record that a capture ended; if an anomaly requested the capture, the cooldown begins."""
        if manifest.trigger.kind == "anomaly":
            self._captured = manifest.step
            self._made += 1

    def _compare(self, summary: StepSummary) -> None:
        """End the cooldown after a capture if the captured step was as usual.

        Such a capture does not show the anomaly, and the next one may be requested at once.
        """
        noticed = self._requested.pop(summary.step, None)
        if noticed is not None and not noticed.lasts_in(summary):
            self._captured = None

    def _is_read_further(self, noticed: Suspicion) -> bool:
        """Return whether torch's flight recorders are still read to find the late process."""
        soon = self._listened <= 2 * ASKED_STEPS or time.monotonic() <= self._noticed_s + READ_S
        reads = self._recorders.due and self._recorders.exist
        return soon and reads and bool(noticed.stage) and not noticed.suspects

    def _refusal(self, step: int) -> str:
        """Return why the trigger's limits forbid a capture of this step; empty if they do not."""
        options = self._options
        if self._made >= options.max_captures:
            return f"the watch has requested {self._made} captures (watch.trigger.max_captures)"
        if self._captured is not None and step - self._captured <= options.cooldown:
            since = f"step {self._captured} was captured"
            return (
                f"{since}, and the watch pauses for {options.cooldown} steps "
                "(watch.trigger.cooldown)"
            )
        return ""

    def _selection(self, noticed: Suspicion) -> CaptureSelection | None:
        """Return the workers to capture, and their stage if the anomaly is in one stage.

        The workers are the suspects and one peer; without suspects, all workers that ran the slow
        stage. A slow rollout without suspects is captured as in the settings: agent loops or
        engines may be its cause.
        """
        uses = self._workers(noticed)
        if not uses:
            return None
        engines = [use for use in uses if use.role == ROLLOUT_ROLE and use.replica is not None]
        selection = CaptureSelection(mode="e2e", roles=_distinct(use.role for use in uses))
        if noticed.suspects or noticed.peers:
            selection = replace(
                selection,
                ranks=_distinct(use.rank for use in uses if use not in engines),
                replicas=_distinct(use.replica for use in uses if use.replica is not None),
            )
        stages = _stages_to_capture(noticed, bool(engines))
        if stages is not None:
            selection = replace(selection, mode="discrete", stages=stages)
        try:
            self._check(selection)
        except ConfigError as error:
            lanes = ", ".join(use.lane for use in uses)
            logger.warning("watch: the capture is not limited to %s: %s", lanes, error)
            return None
        return selection

    def _workers(self, noticed: Suspicion) -> list[RankUse]:
        lanes = [*noticed.suspects, *noticed.peers]
        if not lanes and sign_of(noticed).of_all and noticed.stage != ROLLOUT:
            lanes = noticed.everyone
        return [self._uses[lane] for lane in lanes if lane in self._uses and lane != LOOP.lane]


def _stages_to_capture(noticed: Suspicion, in_engines: bool) -> tuple[str, ...] | None:
    """Return the stages to capture, inside the slow stage; ``None`` for the whole step."""
    if not sign_of(noticed).of_stage:
        return None
    if not in_engines:
        return _distinct(noticed.ran)
    if noticed.stage != ROLLOUT or not noticed.ran:
        return None
    # Engines are captured as the stage rollout, whatever the watch calls their work (generate).
    return _distinct([*noticed.ran, ROLLOUT])


def _distinct(values: Iterable[T]) -> tuple[T, ...] | None:
    return tuple(dict.fromkeys(values)) or None
