"""Findings about trajectories: rules with a threshold, as in :mod:`verl_profiling.report.findings`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from verl_profiling.report.capture_rows import slow_replica
from verl_profiling.report.model import Report
from verl_profiling.report.records import BEFORE, LOOP_LAG, OWN_CODE, UNEXPLAINED, UNKNOWN
from verl_profiling.report.rollout_section import KEPT
from verl_profiling.report.rows import BlockRow, Rollout
from verl_profiling.report.sentences import counted
from verl_profiling.units import duration, listed

_LOOP_BLOCKED = 0.02
POLLS = 0.05
"""Share of the step lost to polling above which the polling trainer is a finding."""

_AWAIT = "await it, or run it in a thread (asyncio.to_thread)"
TAIL = "or carry the tail over to the next step (partial rollout)"
MARK_MORE = "mark more of the agent loop with span(), so that this time gets a name"
_ADVICE = {
    "tool": "run more of it at once, give it a time limit, or cache what it answers",
    "environment": "keep environments warm, start them ahead of time, or give them a time limit",
    "reward": "score while other trajectories still run, or in more processes",
    "wait": "add to what it waits for, or ask for less of it at once",
    "queued": "more replicas, fewer requests at once, or less reserved memory for each (a larger KV cache)",
    "decode": f"cap the response length, balance prompts by expected length, {TAIL}",
    "to the engine": "look at what is between the loop and the engine's scheduler: the load balancer, HTTP, "
    "tokenizing and other work in the server's process",
    "from the engine": "look at what is between the engine and the loop: detokenizing and other work in the "
    "server's process, HTTP",
    LOOP_LAG: f"see what blocks the event loops: {_AWAIT}",
    OWN_CODE: MARK_MORE,
    BEFORE: "switch the watch on, which knows the spans that are open, or capture steps in a row",
}
"""Advice by the cause of the trajectories' time."""


class Found(NamedTuple):
    """The result of a rule.

    Attributes:
        share: Share of time that is compared with the rule's threshold.
        seconds: Lane-seconds at stake.
        lanes: The lanes that the finding is about.
        text: A sentence with its number.
        advice: What to try.
    """

    share: float
    seconds: float
    lanes: Sequence[str]
    text: str
    advice: str


def _of_rollout(
    found_in: Callable[[Report, Rollout], Iterator[Found]],
) -> Callable[[Report], Iterator[Found]]:
    """Turn a rule on the rollout into a rule on the report; its seconds become lane-seconds of all lanes."""

    def found(report: Report) -> Iterator[Found]:
        if report.rollout is not None and report.rollout.seconds:
            for one in found_in(report, report.rollout):
                yield one._replace(seconds=on_all(report, one.seconds))

    return found


@_of_rollout
def _blocked(report: Report, rollout: Rollout) -> Iterator[Found]:
    """Yield a finding per function or span that blocked event loops, over all processes."""
    by_name: dict[str, list[BlockRow]] = {}
    for row in rollout.blocks:
        by_name.setdefault(row.what, []).append(row)
    for what, rows in sorted(by_name.items(), key=lambda item: -_stood_still(item[1])):
        longest = max(rows, key=lambda row: row.seconds)
        blocks, stopped = sum(row.blocks for row in rows), sum(row.trajectories for row in rows)
        lanes, name = [row.lane for row in rows], called(what)
        who, advice = f"{name[:1].upper()}{name[1:]}", f"{_AWAIT}, so that the others go on"
        if what == UNKNOWN:
            who = "Something unknown"
            advice = "look for a thread that keeps the GIL, or for too few CPUs: no task was seen to block it"
        many = f", {blocks} times" if blocks > 1 else ""
        where = f" (in {longest.function})" if longest.function not in ("", what) else ""
        text = (
            f"{who} blocked the event loop{'s' * (len(lanes) > 1)} of {listed(lanes)} for "
            f"{duration(sum(row.seconds for row in rows))}{many}{where}: {counted(stopped, 'trajectory')} "
            f"stood still, {duration(_stood_still(rows))} added up."
        )
        seconds = min(longest.seconds, rollout.wall_s)
        yield Found(_stood_still(rows) / rollout.seconds, seconds, lanes, text, advice)


def _loops_are_blocked(report: Report) -> bool:
    return any(found.share >= _LOOP_BLOCKED for found in _blocked(report))


def _stood_still(rows: Sequence[BlockRow]) -> float:
    return sum(row.stood_still_s for row in rows)


@_of_rollout
def _last_trajectories(report: Report, rollout: Rollout) -> Iterator[Found]:
    if last := rollout.last:
        most = last.parts[0] if last.parts else None
        cause = most.cause if most else ""
        if cause == LOOP_LAG and _loops_are_blocked(report):
            return  # it follows from the blocks
        who = "trajectory takes" if last.trajectories == 1 else f"{last.trajectories} trajectories take"
        text = (
            f"The last {who} {duration(last.seconds)}, {last.share:.0%} of {rollout.of_trajectories} "
            f"({last.trajectories / last.of:.1%} of {last.of} trajectories)"
            + (f": {most.share:.0%} of that is {called(cause)}." if most else ".")
        )
        advice = (slow_replica(report.replicas) if cause == "decode" else "") or _advice(cause)
        yield Found(last.share - last.trajectories / last.of, last.seconds, [], text, advice)


@_of_rollout
def _one_cause(report: Report, rollout: Rollout) -> Iterator[Found]:
    """Yield the largest cause but the engine's own work; skip loop lag if :func:`_blocked` reports it."""
    of_engines = ("decode", "generate", "prefill", "first token")
    said = (*of_engines, BEFORE, UNEXPLAINED, *((LOOP_LAG,) if _loops_are_blocked(report) else ()))
    for row in [row for row in rollout.causes if not row.validate and row.cause not in said][:1]:
        calls = next((call for call in rollout.calls if call.name == row.cause), None)
        each = calls and (
            f" ({calls.calls:,} calls, p50 {duration(calls.p50_s)}, p99 {duration(calls.p99_s)}, up to "
            f"{calls.most_running} at once)"
        )
        text = (
            f"{row.share:.0%} of the trajectories' time ({duration(row.seconds)}) is "
            f"{called(row.cause)}{each or ''}."
        )
        yield Found(row.share, row.share * rollout.wall_s, [], text, _advice(row.cause))


@_of_rollout
def _for_nothing(report: Report, rollout: Rollout) -> Iterator[Found]:
    rows = [row for row in rollout.statuses if not row.validate and row.status not in KEPT]
    share = sum(row.share for row in rows)
    text = (
        f"{share:.0%} of the trajectories' time ({duration(sum(row.seconds for row in rows))}) went into "
        "those that nothing is made of: " + ", ".join(f"{row.trajectories} {row.status}" for row in rows[:4])
    )
    advice = "stop them sooner, filter prompts before the rollout, or repair what makes them fail"
    yield Found(share, share * rollout.wall_s, [], f"{text}.", advice)


@_of_rollout
def polling(report: Report, rollout: Rollout) -> Iterator[Found]:
    if of := rollout.polling:
        text = (
            f"The trainer slept {duration(of.late_s)} ({of.late_share:.0%} of the step) after the "
            f"last response was there: it looks into its replay buffer every {duration(of.interval_s)}."
        )
        advice = (
            "look more often; with verl, name a replay buffer of your own with a smaller "
            "poll_interval in trainer.v1.sampler.custom_sampler"
        )
        yield Found(of.late_share, of.late_s, [], text, advice)


def called(cause: str) -> str:
    """Return a cause as a sentence shows it, e.g. ``tool `search``` for ``tool:search``."""
    family, _, name = cause.partition(":")
    return f"{family} `{name}`" if name and family in ("tool", "wait") else cause


def _advice(cause: str) -> str:
    return _ADVICE.get(cause) or _ADVICE.get(cause.partition(":")[0]) or _ADVICE["tool"]


def on_all(report: Report, seconds: float) -> float:
    """Convert seconds that every device lane loses to lane-seconds."""
    return seconds * max(len(report.devices), 1)


RULES = (
    ("loop_blocked", _LOOP_BLOCKED, _blocked),  # of the trajectories' time
    ("last_trajectories", 0.15, _last_trajectories),  # share of the rollout minus share of the trajectories
    ("trajectory_cause", 0.25, _one_cause),  # of the trajectories' time
    ("trajectories_for_nothing", 0.10, _for_nothing),
    ("polling", POLLS, polling),  # of the step
)
