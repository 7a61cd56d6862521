"""Tells how much of a slow stage, or of a slow process, is due to more tokens in its data.

The times and tokens of the last steps give the usual time for so many tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.files.watch_signs import sign_of
from verl_profiling.slices.lead_fit import LEAST_RUNS, Explained, Runs, explained
from verl_profiling.units import duration
from verl_profiling.watch.suspicion import Suspicion


class WorkPast:
    """The last steps whose work is known: the tokens that each process had in each stage.

    Args:
        most: Number of steps that are kept.
    """

    def __init__(self, most: int) -> None:
        self._steps: deque[StepSummary] = deque(maxlen=most)

    def add(self, summary: StepSummary) -> None:
        """Keep a step, if its work is known."""
        if summary.work:
            self._steps.append(summary)

    def explained(self, suspicion: Suspicion, summary: StepSummary) -> Suspicion:
        """Return the suspicion with a sentence on data and machine, if the tokens of its stage are
        known.

        Only steps with the tokens of the same processes are compared: totals of others differ.
        """
        stage = suspicion.stage
        uses = _with_tokens(stage, summary)
        if not uses:
            return suspicion
        steps = [step for step in self._steps if _with_tokens(stage, step).keys() == uses.keys()]
        if sign_of(suspicion).is_of_process:
            sentence = _of_leader(suspicion, steps)
        else:
            sentence = _of_step(stage, steps)
        if not sentence:
            return suspicion
        return replace(suspicion, reason=f"{suspicion.reason}; {sentence}")


def _with_tokens(stage: str, step: StepSummary) -> dict[str, RankUse]:
    """Return the processes whose tokens in a stage are known, by lane."""
    found = {}
    for use in step.processes:
        work = (use.work or {}).get(stage)
        if work is not None and work.tokens is not None:
            found[use.lane] = use
    return found


def _of_step(stage: str, steps: Sequence[StepSummary]) -> str:
    """Compare a stage in the last step with the steps before, by the most tokens of a process.

    The answer is a sentence, or empty.
    """
    *before, last = [_run_of_step(stage, step) for step in steps]
    return _sentence(last, before, [], len(steps))


def _of_leader(suspicion: Suspicion, steps: Sequence[StepSummary]) -> str:
    """Compare the slowest process with its peers in the last step, by their runs in all steps.

    The answer is a sentence. It is empty where lateness to collectives is known, as the durations
    contain waits there.
    """
    stage, leader = suspicion.stage, "".join(suspicion.suspects[:1])
    *before, last = [_with_tokens(stage, step) for step in steps]
    if leader not in last:
        return ""
    role = last[leader].role
    peers = [lane for lane, use in last.items() if use.role == role and lane != leader]
    uses = [of_step[lane] for of_step in (*before, last) for lane in peers]
    if not peers or any(use.late_ns is not None for use in uses):
        return ""
    runs = [_run(stage, use) for use in uses]
    many = len(runs) - len(peers)
    return _sentence(_run(stage, last[leader]), runs[many:], runs[:many], len(steps))


def _run_of_step(stage: str, step: StepSummary) -> Runs:
    """Return a stage's exposed time in a step, with the work of the process with most tokens."""
    each = [_run(stage, use) for use in _with_tokens(stage, step).values()]
    heaviest = max(each, key=lambda run: float(run.tokens[0]))
    return heaviest._replace(seconds=np.array([step.exposed_s.get(stage, 0.0)]))


def _run(stage: str, use: RankUse) -> Runs:
    """Return the time and work of a process's stage in a step, as if it had run once."""
    work = (use.work or {})[stage]
    took_ns = sum(ns for name, _, _, ns in use.each_run() if name == stage)
    facts = took_ns / 1e9, work.tokens or 0, work.tokens_squared or 0
    return Runs(*[np.array([float(fact)]) for fact in facts])


def _sentence(leader: Runs, peers: Sequence[Runs], earlier: Sequence[Runs], steps: int) -> str:
    """Return a sentence on how much of the leader's additional time is due to its data, and how
    much to its machine.

    Args:
        leader: The slow run.
        peers: The runs that it is compared with.
        earlier: Further runs, for the fit of time to tokens.
        steps: Number of steps that they are from.
    """
    if len(peers) + len(earlier) < LEAST_RUNS:
        return f"data or machine: cannot tell: {steps} steps"
    found = explained(leader, peers, earlier)
    mean_s = sum(float(runs.seconds[0]) for runs in peers) / len(peers)
    lead_s = float(leader.seconds[0]) - mean_s
    if lead_s <= 0:
        return ""
    if not isinstance(found, Explained):
        return f"data or machine: {found}"
    found = found.within(lead_s)
    if not found.tells(lead_s):
        return f"data or machine: {found.unsure}"
    parts = [duration(part_s) for part_s in (lead_s, found.data_s, lead_s - found.data_s)]
    return (
        f"of {parts[0]} more, {parts[1]} are its data ({found.tokens:.1f} times the tokens), "
        f"{parts[2]} the machine"
    )
