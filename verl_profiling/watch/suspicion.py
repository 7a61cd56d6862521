"""A suspicion of the watch: the sign, the stage, and the processes that may be the cause."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from verl_profiling.capture_request import Trigger, TriggerKind
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.watch.exposed import standings
from verl_profiling.watch.standing import TIED, Standing

MOST_SUSPECTS = 4
NOBODY = "no process was longer there than the others"
_BESIDE_THE_LEADER = 0.5


class Suspicion(Trigger, frozen=True, kw_only=True):
    """An anomaly that the watch detected in a step, and the processes that may be its cause.

    Attributes:
        everyone: Lanes of all processes that worked in the stage, if none was longer than the
            others.
        ran: Names of the stages that these processes ran inside the loop's stage.
        is_over: Whether only one step was slow, which is not worth a capture of the next step.
        likely: Leader of one later step, a suspect if it leads in a further step.
    """

    kind: TriggerKind = "anomaly"
    everyone: list[str] = []
    ran: list[str] = []
    is_over: bool = False
    likely: str = ""

    def trigger(self) -> Trigger:
        """Return the trigger of a capture that this suspicion requests, for its manifest."""
        return Trigger(**{field: getattr(self, field) for field in Trigger.__struct_fields__})

    def with_suspects(self, summary: StepSummary) -> Suspicion:
        """Return the suspicion with its suspects: the slowest processes in the stage of a step."""
        working = standings(summary).get(self.stage, [])
        suspects: list[str] = []
        peers: list[str] = []
        ran: dict[str, None] = {}
        for standing in working:
            found = stand_out(standing)
            peers += healthiest(standing.by_lane(), found) if found else []
            suspects += [lane for lane in found if lane not in suspects]
            ran |= dict.fromkeys(standing.ran) if found else {}
        suspects = suspects[:MOST_SUSPECTS]
        everyone = list(working[0].lanes) if working and not suspects else []
        ran |= dict.fromkeys(working[0].ran) if everyone else {}
        return msgspec.structs.replace(
            self, suspects=suspects, peers=peers, everyone=everyone, ran=list(ran)
        )

    @property
    def who(self) -> list[str]:
        """A sentence with the suspects of a stage; empty if the reason contains the suspects."""
        if not self.stage or (self.sign == "leader" and len(self.suspects) <= 1):
            return []
        return [f"longest there: {', '.join(self.suspects)}" if self.suspects else NOBODY]

    def lasts_in(self, summary: StepSummary) -> bool:
        """Return whether at least half of the excess is left in another step;
        always of the other signs.
        """
        if self.sign not in ("slow_stage", "slow_step"):
            return True
        took_s = (
            summary.exposed_s.get(self.stage, 0.0) if self.sign == "slow_stage" else summary.seconds
        )
        return 2 * took_s >= self.value + self.median

    def named_in(self, summary: StepSummary) -> Suspicion:
        """Return the suspicion, with suspects if two later slow steps have the same first suspect.

        In both steps, the suspect has to explain half of the excess.
        """
        if not self.lasts_in(summary):
            return self
        first = next(iter(standings(summary).get(self.stage, [])), None)
        lead_s = first.lead_ns / 1e9 if first is not None else 0.0
        if 2 * lead_s < self.value - self.median:
            return self
        later = self.with_suspects(summary)
        if later.suspects[:1] != [self.likely]:
            return msgspec.structs.replace(self, likely="".join(later.suspects[:1]))
        who = f"longest there in step {summary.step}: {', '.join(later.suspects)}"
        reason = self.reason.replace(NOBODY, who)
        return msgspec.structs.replace(later, reason=reason)


def stand_out(standing: Standing) -> list[str]:
    """Return the processes of a role that were longer in a stage than the others, the leader first.

    Included are the leader, if its lead exceeds the tolerance ``TIED``, and processes that exceed
    the median by more than half of that lead. The only process of a role is included, too.
    """
    durations = standing.by_lane()
    if len(durations) == 1:
        return [standing.leader] if standing.leader else []
    if standing.lead_ns <= TIED * max(durations.values()):
        return []
    ordered = sorted(durations, key=durations.__getitem__, reverse=True)
    middle_ns = durations[ordered[len(ordered) // 2]]
    enough_ns = middle_ns + _BESIDE_THE_LEADER * standing.lead_ns
    also_slow = [
        lane for lane in ordered if lane != standing.leader and durations[lane] > enough_ns
    ]
    return [standing.leader, *also_slow][:MOST_SUSPECTS]


def healthiest(values: Mapping[str, float], suspects: list[str]) -> list[str]:
    """Return the lane nearest to the median that is no suspect, as a list;
    empty if all are suspects.
    """
    ordered = sorted(values, key=values.__getitem__)
    middle = values[ordered[(len(ordered) - 1) // 2]]
    others = [lane for lane in ordered if lane not in suspects]
    return [min(others, key=lambda lane: abs(values[lane] - middle))] if others else []
