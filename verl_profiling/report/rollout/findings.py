"""What stands out in a rollout: blocked loops, its last trajectories, one cause, what was made for nothing.

Time at stake is in lane-seconds, as that of all findings: a share of the trajectories' time counts as that
share of the time from the first one's begin to the last one's end, on all lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_profiling.report.model import Finding, Report
from verl_profiling.report.replicas import slow_replica
from verl_profiling.report.rollout.outcomes import KEPT
from verl_profiling.report.rollout.pieces import BEFORE, LOOP_LAG, OWN_CODE, UNEXPLAINED
from verl_profiling.report.rollout.records import UNKNOWN
from verl_profiling.report.rows import BlockRow, Rollout
from verl_profiling.report.thresholds import FINDINGS
from verl_profiling.units import duration

_ENGINE_WORKS = ("decode", "generate", "prefill", "first token")
_FEW_LANES = 3
MARK_MORE = "mark more of the agent loop with span(), so that this time gets a name"
_TOOLS = "run more of it at once, give it a time limit, or cache what it answers"
_BLOCK = "await it, or run it in a thread (asyncio.to_thread), so that the others go on"
_UNKNOWN_BLOCK = "look for a thread that keeps the GIL, or for too few CPUs: no task was seen to block it"
_ADVICE = {
    "tool": _TOOLS,
    "environment": "keep environments warm, start them ahead of time, or give them a time limit",
    "reward": "score while other trajectories still run, or in more processes",
    "wait": "add to what it waits for, or ask for less of it at once",
    "queued": "more replicas, fewer requests at once, or less reserved memory for each (a larger KV cache)",
    "decode": "cap the response length, balance prompts by expected length, or carry the tail over to the "
    "next step (partial rollout)",
    "to the engine": "look at what is between the loop and the engine's scheduler: the load balancer, HTTP, "
    "tokenizing and other work in the server's process",
    "from the engine": "look at what is between the engine and the loop: detokenizing and other work in the "
    "server's process, HTTP",
    LOOP_LAG: "see what blocks the event loops: await it, or run it in a thread (asyncio.to_thread)",
    OWN_CODE: MARK_MORE,
    BEFORE: "switch the watch on, which knows the spans that are open, or capture steps in a row",
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
    lanes = max(len(report.counted), 1)
    blocked = False
    for finding in _blocked(rollout, lanes):
        blocked = True
        yield finding
    yield from _last(rollout, lanes, slow_replica(report.replicas))
    yield from _one_cause(rollout, lanes, blocked)
    yield from _for_nothing(rollout, lanes)
    yield from _polling(rollout, lanes)


def _blocked(rollout: Rollout, lanes: int) -> Iterator[Finding]:
    """Yield what blocked event loops, of all processes together, while trajectories stood still."""
    by_name: dict[str, list[BlockRow]] = {}
    for row in rollout.blocks:
        by_name.setdefault(row.what, []).append(row)
    for rows in sorted(by_name.values(), key=_stood_still, reverse=True):
        if _stood_still(rows) / rollout.seconds < FINDINGS["loop_blocked"]:
            return
        longest = max(rows, key=lambda row: row.seconds)
        blocks, stopped = sum(row.blocks for row in rows), sum(row.trajectories for row in rows)
        unknown = longest.what == UNKNOWN
        many = f", {blocks} times" if blocks > 1 else ""
        where = f" (in {longest.function})" if longest.function not in ("", longest.what) else ""
        yield Finding(
            rule="loop_blocked",
            text=f"{'Something unknown' if unknown else _sentence(called(longest.what))} blocked the event "
            f"{_loops([row.lane for row in rows])} for {duration(sum(row.seconds for row in rows))}"
            f"{many}{where}: {stopped} trajector{'ies' if stopped > 1 else 'y'} stood still, "
            f"{duration(_stood_still(rows))} added up.",
            advice=_UNKNOWN_BLOCK if unknown else _BLOCK,
            seconds=min(longest.seconds, rollout.wall_s) * lanes,
            lanes=[row.lane for row in rows],
        )


def _stood_still(rows: Sequence[BlockRow]) -> float:
    return sum(row.stood_still_s for row in rows)


def _loops(lanes: Sequence[str]) -> str:
    """Return ``loop of a``, ``loops of a and b``, or ``loops of a, b and 6 other processes``."""
    if len(lanes) == 1:
        return f"loop of {lanes[0]}"
    if len(lanes) <= _FEW_LANES:
        return f"loops of {', '.join(lanes[:-1])} and {lanes[-1]}"
    return f"loops of {', '.join(lanes[:2])} and {len(lanes) - 2} other processes"


def _last(rollout: Rollout, lanes: int, slow: str) -> Iterator[Finding]:
    last = rollout.last
    if last is None or last.share - last.trajectories / last.of < FINDINGS["last_trajectories"]:
        return
    most = last.parts[0] if last.parts else None
    what = f": {most.share:.0%} of that is {called(most.cause)}" if most else ""
    one = last.trajectories == 1
    who = "trajectory takes" if one else f"{last.trajectories} trajectories take"
    yield Finding(
        rule="last_trajectories",
        text=f"The last {who} {duration(last.seconds)}, {last.share:.0%} of {rollout.of_trajectories} "
        f"({last.trajectories / last.of:.1%} of {last.of} trajectories){what}.",
        advice=(slow if most and most.cause == "decode" else "") or _advice(most.cause if most else ""),
        seconds=last.seconds * lanes,
    )


def _one_cause(rollout: Rollout, lanes: int, blocked: bool) -> Iterator[Finding]:
    """Yield the largest cause besides the engine's own work, if it is large; lag is named once."""
    said = (*_ENGINE_WORKS, BEFORE, UNEXPLAINED, *((LOOP_LAG,) if blocked else ()))
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


def _polling(rollout: Rollout, lanes: int) -> Iterator[Finding]:
    polling = rollout.polling
    if polling is not None and polling.late_share >= FINDINGS["polling"]:
        yield Finding(
            rule="polling",
            text=f"The trainer slept {duration(polling.late_s)} ({polling.late_share:.0%} of the step) after "
            "the last response was there: it looks into its replay buffer every "
            f"{duration(polling.interval_s)}.",
            advice="look more often; with verl, name a replay buffer of your own with a smaller "
            "poll_interval in trainer.v1.sampler.custom_sampler",
            seconds=polling.late_s * lanes,
        )


def _advice(cause: str) -> str:
    return _ADVICE.get(cause) or _ADVICE.get(cause.partition(":")[0]) or _TOOLS


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" if text else text
