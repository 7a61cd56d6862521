"""A suspicion of the watch: the sign, the stage, and the processes that may be the cause."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from verl_profiling.capture_request import Sign, Trigger
from verl_profiling.step_summary import StepSummary
from verl_profiling.watch.exposed import standings
from verl_profiling.watch.frontier import TIED, Standing

MOST_SUSPECTS = 4
_BESIDE_THE_LEADER = 0.5


class Suspicion(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the watch noticed in a step, and whom it may come from.

    Attributes:
        step: The step.
        sign: What was noticed.
        reason: It, as a sentence.
        stage: The stage in which it shows; empty for none, or for the time that lies in none.
        suspects: Lanes that may be the cause, the likeliest first; empty if none stands out.
        peers: Lanes of healthy processes of the same roles, one of each, to compare them with.
        everyone: Lanes of all that worked in the stage, where none of them stands out.
        ran: Names of the stages of their own that they ran in it.
        value: What the step had: seconds, a share of the step, or bytes.
        median: What the steps before it had.
        history: Their values and that of the step, in order.
    """

    step: int
    sign: Sign
    reason: str
    stage: str = ""
    suspects: list[str] = []
    peers: list[str] = []
    everyone: list[str] = []
    ran: list[str] = []
    value: float = 0.0
    median: float = 0.0
    history: list[float] = []

    def trigger(self) -> Trigger:
        """Return what the manifest of a capture says that is made because of it."""
        return Trigger(
            kind="anomaly",
            reason=self.reason,
            sign=self.sign,
            noticed=self.step,
            stage=self.stage,
            suspects=self.suspects,
            peers=self.peers,
            value=self.value,
            median=self.median,
            history=self.history,
        )

    def with_suspects(self, steps: Iterable[tuple[StepSummary, StepSummary | None]]) -> Suspicion:
        """Return it with those who stood out in its stage in each of some steps.

        Args:
            steps: The steps in which it shows, each with the one before it; the latest last.
        """
        each = [standings(summary, before).get(self.stage, []) for summary, before in steps]
        working = each[-1]
        always = set.intersection(*({lane for one in those for lane in stand_out(one)} for those in each))
        suspects: list[str] = []
        peers: list[str] = []
        ran: dict[str, None] = {}
        for standing in working:
            found = [lane for lane in stand_out(standing) if lane in always]
            peers += healthiest(standing.by_lane(), found) if found else []
            suspects += [lane for lane in found if lane not in suspects]
            ran |= dict.fromkeys(standing.ran) if found else {}
        suspects = suspects[:MOST_SUSPECTS]
        everyone = list(working[0].lanes) if working and not suspects else []
        ran |= dict.fromkeys(working[0].ran) if everyone else {}
        who = f"longest there: {', '.join(suspects)}" if suspects else "no process stands out there"
        says_who = self.sign == "leader" and len(suspects) <= 1
        reason = f"{self.reason}; {who}" if self.stage and not says_who else self.reason
        return msgspec.structs.replace(
            self, suspects=suspects, peers=peers, everyone=everyone, ran=list(ran), reason=reason
        )


def stand_out(standing: Standing) -> list[str]:
    """Return the processes of a role that were longer in a stage than the others, the leader first.

    They are the leader, if it leads by more than what counts as equal, and those that are behind the median
    by half as much or more. The only process of a role is one, too.
    """
    durations = standing.by_lane()
    if len(durations) == 1:
        return [standing.leader] if standing.leader else []
    if standing.lead_ns <= TIED * max(durations.values()):
        return []
    ordered = sorted(durations, key=durations.__getitem__, reverse=True)
    middle_ns = durations[ordered[len(ordered) // 2]]
    enough_ns = middle_ns + _BESIDE_THE_LEADER * standing.lead_ns
    beside = [lane for lane in ordered if lane != standing.leader and durations[lane] > enough_ns]
    return [standing.leader, *beside][:MOST_SUSPECTS]


def healthiest(values: Mapping[str, float], suspects: list[str]) -> list[str]:
    """Return the lane that is nearest to the median of all, and no suspect; none if there is no other."""
    ordered = sorted(values, key=values.__getitem__)
    middle = values[ordered[(len(ordered) - 1) // 2]]
    others = [lane for lane in ordered if lane not in suspects]
    return [min(others, key=lambda lane: abs(values[lane] - middle))] if others else []
