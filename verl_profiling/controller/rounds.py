"""The rounds of calls that start and stop a capture, and what is taken from their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.controller.calls import Round, Target
from verl_profiling.controller.late_answers import OverdueStop
from verl_profiling.controller.open_capture import OpenCapture
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.watch import Watch
from verl_profiling.settings.timeouts import Timeouts

__all__ = ["Rounds"]

HANDSHAKES = 8


class Rounds:
    """Starts and stops workers for a capture; each method yields the rounds that are to be waited for.

    Args:
        roster: The workers.
        timeouts: How long their answers are waited for.
        watch: Takes what comes along with them, if it is on.
    """

    def __init__(self, roster: Roster, timeouts: Timeouts, watch: Watch | None = None) -> None:
        self._watch = watch
        self._roster = roster
        self._timeouts = timeouts

    def start(self, live: OpenCapture, request: CaptureRequest) -> Iterator[Round]:
        """Start what a request is for: the engines of a rollout window, or all others that are driven."""
        targets = self._concerned(request, self._roster.driven(request.aim))
        round_ = Round(self._roster.send(targets, "start_capture", request), self._timeouts.start_s)
        live.participants.take_calls(round_)
        yield round_
        self._roster.remember_unanswered(round_)
        live.participants.take_starts(round_, request)
        yield from self._shake_hands(live, "start_capture", request, live.participants.remote_clocks())

    def stop(self, live: OpenCapture, *requests: CaptureRequest) -> Iterator[Round]:
        """Stop what was started with these requests, all at the same time."""
        participants, stop_s = live.participants, self._timeouts.stop_s
        remote = participants.remote_clocks()
        rounds = []
        for request in requests:
            targets = participants.called(self._concerned(request, self._roster.targets))
            calls = self._roster.send(targets, "stop_capture", request.capture_id)
            rounds.append(Round(calls, stop_s))
        yield Round([call for round_ in rounds for call in round_.calls], stop_s)
        for round_, request in zip(rounds, requests, strict=True):
            self._roster.remember_unanswered(round_)
            overdue = participants.take_stops(round_, request)
            if self._watch is not None:
                self._watch.take(round_.calls)
            live.overdue += [OverdueStop(call, request, participants) for call in overdue]
        yield from self._shake_hands(live, "stop_capture", requests[-1].capture_id, remote)

    def _concerned(self, request: CaptureRequest, targets: Iterable[Target]) -> list[Target]:
        windowed = request.stage is not None
        return [target for target in targets if self._roster.has_windows(target, request.aim) is windowed]

    def _shake_hands(
        self, live: OpenCapture, method: str, argument: CaptureRequest | str, targets: Iterable[Target]
    ) -> Iterator[Round]:
        """Repeat a call, which changes nothing, to measure clocks that are not the controller's."""
        for _ in range(HANDSHAKES if targets else 0):
            round_ = Round(self._roster.send(targets, method, argument), self._timeouts.start_s)
            yield round_
            live.participants.take_handshakes(round_, closing=method == "stop_capture")
