"""How much of a slow stage, or of a process's lead, its data explain, from the steps before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.slices.work import LEAST_RUNS, UNSURE, Explained, Runs, explained
from verl_profiling.units import duration
from verl_profiling.watch.suspicion import Suspicion


class WorkPast:
    """The last steps with known work. What they say is computed only for a suspicion.

    Args:
        most: Number of steps.
    """

    def __init__(self, most: int) -> None:
        self._steps: deque[StepSummary] = deque(maxlen=most)

    def add(self, summary: StepSummary) -> None:
        """Keep a step."""
        if summary.work:
            self._steps.append(summary)

    def explained(self, suspicion: Suspicion, summary: StepSummary) -> Suspicion:
        """Return the suspicion with a sentence on data and machine, if its stage has known work."""
        stage = suspicion.stage
        if stage not in summary.work:
            return suspicion
        steps = [step for step in self._steps if stage in step.work]
        if suspicion.sign == "leader":
            sentence = self._of_leader(suspicion, steps)
        else:
            sentence = self._of_step(stage, steps)
        if not sentence:
            return suspicion
        return replace(suspicion, reason=f"{suspicion.reason}; {sentence}")

    def _of_step(self, stage: str, steps: Sequence[StepSummary]) -> str:
        """Compare the last step with the steps before: in each, the process with most tokens."""
        every = [_runs_of_step(stage, step) for step in steps]
        return _sentence(every[-1], every[:-1], len(steps))

    def _of_leader(self, suspicion: Suspicion, steps: Sequence[StepSummary]) -> str:
        """Compare the leader with its peers, unless it was found by its lateness to collectives:
        durations have waits then.
        """
        by_lane: dict[str, list[RankUse]] = {}
        for step in steps:
            for use in step.processes:
                if use.work and suspicion.stage in use.work:
                    if use.late_ns is not None:
                        return ""
                    by_lane.setdefault(use.lane, []).append(use)
        runs = {lane: _runs(suspicion.stage, uses) for lane, uses in by_lane.items()}
        leader = runs.pop(suspicion.suspects[0], None)
        if leader is None or not runs:
            return ""
        return _sentence(leader, list(runs.values()), len(steps))


def _runs_of_step(stage: str, step: StepSummary) -> Runs:
    """Return the time that a stage exposed in a step, with the work of its heaviest process."""
    uses = [use for use in step.processes if use.work and stage in use.work]
    each = [_runs(stage, [use]) for use in uses]
    heaviest = max(each, key=lambda runs: float(runs.tokens[0]))
    return heaviest._replace(seconds=np.array([step.exposed_s.get(stage, 0.0)]))


def _runs(stage: str, uses: Sequence[RankUse]) -> Runs:
    """Return the stage in a process, a run for each step."""
    seconds, tokens, squares = [], [], []
    for use in uses:
        work = (use.work or {})[stage]
        took_ns = sum(ns for name, _, _, ns in use.each_run() if name == stage)
        seconds.append(took_ns / 1e9)
        tokens.append(float(work.tokens or 0))
        squares.append(float(work.tokens_squared or 0))
    return Runs(np.array(seconds), np.array(tokens), np.array(squares))


def _sentence(leader: Runs, peers: Sequence[Runs], steps: int) -> str:
    """Return how much of a lead are data, and how much the machine, for each run of the leader."""
    if sum(len(runs.seconds) for runs in peers) < LEAST_RUNS:
        return f"data or machine: cannot tell: {steps} steps"
    found = explained(leader, peers)
    mean_s = sum(float(runs.seconds.sum()) for runs in peers) / len(peers)
    lead_s = float(leader.seconds.sum()) - mean_s
    if lead_s <= 0:
        return ""
    if isinstance(found, Explained) and not found.tells(lead_s):
        found = UNSURE
    if not isinstance(found, Explained):
        return f"data or machine: {found}"
    runs = len(leader.seconds)
    data_s = min(max(found.data_s, 0.0), lead_s)
    parts = [duration(part_s / runs) for part_s in (lead_s, data_s, lead_s - data_s)]
    return (
        f"of {parts[0]} more, {parts[1]} are its data ({found.tokens:.1f} times the tokens), "
        f"{parts[2]} the machine"
    )
