"""What stands out in a rollout: blocked loops, its last trajectories, one cause, what was made for nothing.

Time at stake is in lane-seconds, as that of all findings: a share of the trajectories' time counts as that
share of the rollout, on all lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_profiling.report.model import Finding, Report
from verl_profiling.report.rollout.fates import KEPT
from verl_profiling.report.rollout.pieces import LOOP_LAG, OWN_CODE, UNEXPLAINED
from verl_profiling.report.rollout.rows import Rollout
from verl_profiling.report.thresholds import FINDINGS
from verl_profiling.units import duration

__all__ = ["called", "rollout_findings"]

_ENGINE_WORKS = ("decode", "generate", "prefill", "first token")
_TOOLS = "run more of it at once, give it a time limit, or cache what it answers"
_ADVICE = {
    "tool": _TOOLS,
    "environment": "keep environments warm, start them ahead of time, or give them a time limit",
    "reward": "score while other trajectories still run, or in more processes",
    "wait": "add to what it waits for, or ask for less of it at once",
    "queued": "more replicas, fewer requests at once, or less reserved memory for each (a larger KV cache)",
    "decode": "cap the response length, balance prompts by expected length, or carry the tail over to the "
    "next step (partial rollout)",
    LOOP_LAG: "see what blocks the event loops: await it, or run it in a thread (asyncio.to_thread)",
    OWN_CODE: "mark more of the agent loop with span(), so that this time gets a name",
}


def called(cause: str) -> str:
    """Return a cause as it is called in a sentence: ``tool `search```."""
    family, _, name = cause.partition(":")
    return f"{family} `{name}`" if name and family in ("tool", "wait") else cause


def rollout_findings(report: Report) -> Iterator[Finding]:
    """Yield what stands out in the rollout of a report."""
    rollout = report.rollout
    if rollout is None or not rollout.seconds:
        return
    lanes = max(len(report.workers), 1)
    blocked = False
    for finding in _blocked(rollout, lanes):
        blocked = True
        yield finding
    yield from _last(rollout, lanes)
    yield from _one_cause(rollout, lanes, blocked)
    yield from _for_nothing(rollout, lanes)


def _blocked(rollout: Rollout, lanes: int) -> Iterator[Finding]:
    """Yield what blocked event loops while trajectories stood still, the first of each name."""
    total = rollout.seconds
    named: set[str] = set()
    for row in sorted(rollout.blocks, key=lambda row: -row.stood_still_s):
        if row.stood_still_s / total < FINDINGS["loop_blocked"] or row.what in named:
            continue
        named.add(row.what)
        many = f", {row.blocks} times" if row.blocks > 1 else ""
        stood = f"{row.trajectories} trajector{'ies' if row.trajectories > 1 else 'y'} stood still"
        yield Finding(
            rule="loop_blocked",
            text=f"{_sentence(called(row.what) or 'a task')} blocked the event loop of {row.lane} for "
            f"{duration(row.seconds)}{many}"
            + (f" (in {row.function})" if row.function else "")
            + f": {stood}, {duration(row.stood_still_s)} added up.",
            advice="await it, or run it in a thread (asyncio.to_thread), so that the others go on",
            seconds=min(row.seconds, rollout.wall_s) * lanes,
            lanes=[row.lane],
        )


def _last(rollout: Rollout, lanes: int) -> Iterator[Finding]:
    last = rollout.last
    if last is None or last.share - last.trajectories / last.of < FINDINGS["last_trajectories"]:
        return
    most = last.parts[0] if last.parts else None
    what = f": {most.share:.0%} of that is {called(most.cause)}" if most else ""
    one = last.trajectories == 1
    who = "trajectory takes" if one else f"{last.trajectories} trajectories take"
    yield Finding(
        rule="last_trajectories",
        text=f"The last {who} {last.share:.0%} of the rollout ({duration(last.seconds)}; "
        f"{last.trajectories / last.of:.1%} of {last.of} trajectories){what}.",
        advice=_advice(most.cause if most else ""),
        seconds=last.seconds * lanes,
    )


def _one_cause(rollout: Rollout, lanes: int, blocked: bool) -> Iterator[Finding]:
    """Yield the largest cause besides the engine's own work, if it is large; lag is named once."""
    said = (*_ENGINE_WORKS, UNEXPLAINED, *((LOOP_LAG,) if blocked else ()))
    rows = [row for row in rollout.causes if not row.validate and row.cause not in said]
    for row in rows[:1]:
        if row.share < FINDINGS["trajectory_cause"]:
            continue
        calls = next((call for call in rollout.calls if call.name == row.cause), None)
        each = (
            f" ({calls.calls:,} calls, p50 {duration(calls.p50_s)}, p99 {duration(calls.p99_s)}, up to "
            f"{calls.most_running} at once)"
            if calls
            else ""
        )
        yield Finding(
            rule="trajectory_cause",
            text=f"{row.share:.0%} of the trajectories' time ({duration(row.seconds)}) is "
            f"{called(row.cause)}{each}.",
            advice=_advice(row.cause),
            seconds=row.share * rollout.wall_s * lanes,
        )


def _for_nothing(rollout: Rollout, lanes: int) -> Iterator[Finding]:
    rows = [row for row in rollout.fates if not row.validate and row.fate not in KEPT]
    share = sum(row.share for row in rows)
    if share >= FINDINGS["trajectories_for_nothing"]:
        listed = ", ".join(f"{row.trajectories} {row.fate}" for row in rows[:4])
        seconds = sum(row.seconds for row in rows)
        yield Finding(
            rule="trajectories_for_nothing",
            text=f"{share:.0%} of the trajectories' time ({duration(seconds)}) went into those that "
            f"nothing is made of: {listed}.",
            advice="stop them sooner, filter prompts before the rollout, or repair what makes them fail",
            seconds=share * rollout.wall_s * lanes,
        )


def _advice(cause: str) -> str:
    return _ADVICE.get(cause) or _ADVICE.get(cause.partition(":")[0]) or _TOOLS


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" if text else text
