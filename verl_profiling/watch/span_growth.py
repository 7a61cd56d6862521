"""Says which spans of trajectories grew where a stage became slow: a tool, an environment, a judge."""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_summary import SpanTotal, StepSummary
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import duration
from verl_profiling.watch.exposed import standings
from verl_profiling.watch.suspicion import Suspicion

__all__ = ["SpanGrowth"]

_MOST_NAMED = 2
_OF_THE_EXCESS = 0.5
_OF_A_SPAN = 1.25

_Who = tuple[str, str]


class SpanGrowth:
    """Follows what the spans of each role add up to, by name.

    Args:
        options: How many steps are compared.
    """

    def __init__(self, options: Anomaly) -> None:
        self._window = options.window
        self._past: dict[_Who, deque[SpanTotal]] = {}

    def observe(self, summary: StepSummary) -> None:
        """Take the summary of a step whose workers were read."""
        totals = _by_role(summary)
        for who in {*self._past, *totals}:
            past = self._past.setdefault(who, deque(maxlen=self._window))
            past.append(totals.get(who, SpanTotal(who[1], 0, 0)))
            if not any(total.runs for total in past):
                del self._past[who]

    def explained(self, found: Suspicion, summary: StepSummary, before: StepSummary | None) -> Suspicion:
        """Return what was noticed in a step, with the spans in its reason that grew along with its stage.

        They are those of the roles that worked in the stage, and grew by half of what the stage did, or more:
        what held it up took at least as long. A trajectory is named where none of its spans is.

        Args:
            found: What was noticed.
            summary: The step, with its workers; not observed yet.
            before: That of the step before.
        """
        if found.sign not in ("slow_stage", "slow_step"):
            return found
        working = {
            lane for standing in standings(summary, before).get(found.stage, ()) for lane in standing.lanes
        }
        roles = {process.role for process in (*summary.loop, *summary.workers) if process.lane in working}
        enough_ns = _OF_THE_EXCESS * (found.value - found.median) * 1e9
        grown: list[tuple[bool, float, str]] = []
        for (role, name), total in _by_role(summary).items():
            past = self._past.get((role, name), ())
            usual_ns = median(one.duration_ns for one in past) if past else 0
            more_ns = total.duration_ns - usual_ns
            if role in roles and more_ns >= enough_ns and total.duration_ns > _OF_A_SPAN * usual_ns:
                runs = median(one.runs for one in past) if past else 0
                grown.append((name == TRAJECTORY, -more_ns, _sentence(role, total, usual_ns, runs)))
        if not grown:
            return found
        inside = [one for one in sorted(grown) if not one[0]] or grown
        named = [sentence for _, _, sentence in inside[:_MOST_NAMED]]
        return msgspec.structs.replace(found, reason="; ".join([found.reason, *named]))


def _by_role(summary: StepSummary) -> dict[_Who, SpanTotal]:
    found: dict[_Who, SpanTotal] = {}
    for process in (*summary.loop, *summary.workers):
        for total in process.spans:
            who = process.role, total.name
            found[who] = found[who] + total if who in found else total
    return found


def _sentence(role: str, total: SpanTotal, usual_ns: float, runs: float) -> str:
    return (
        f"{total.name} of {role} took {duration(total.duration_ns / 1e9)} in {_calls(total.runs)}, "
        f"usually {duration(usual_ns / 1e9)} in {_calls(runs)}"
    )


def _calls(runs: float) -> str:
    return f"{runs:,.0f} {'call' if runs == 1 else 'calls'}"
