"""Finds the lanes of a role that differ from the others, with the number in which they differ."""

from __future__ import annotations

from statistics import median

from verl_profiling.report.lost import ROLLOUT
from verl_profiling.report.model import Report
from verl_profiling.report.rows import WorkerRow
from verl_profiling.units import duration


class Outlier:
    """When a lane stands out from the others of its role.

    Attributes:
        SLOWER: Times the median of the role that it takes for a stage.
        OF_THE_STEP: Share of the step that this, or waiting for it, has to be.
        LATE_SHARE: Share of a collective's calls at which it is last.
        LATE_CALLS: Number of calls that say enough.
        SPREADS: Robust standard deviations between its busy share and the median.
        POINTS: The same, in busy share, at the least.
    """

    SLOWER = 1.2
    OF_THE_STEP = 0.03
    LATE_SHARE = 0.8
    LATE_CALLS = 5
    SPREADS = 3.0
    POINTS = 0.05


_NORMAL = 1.4826  # median absolute deviation of a normal distribution, in standard deviations


def outliers(report: Report) -> dict[str, str]:
    """Return what stands out about a worker or lane, by its name; the most telling ones first."""
    found: dict[str, str] = {}
    late = next((finding for finding in report.findings if finding.rule == "long_tail"), None)
    if late is not None and report.tail is not None:
        done, usual = duration(report.tail.last_finish_us / 1e6), duration(report.tail.median_finish_us / 1e6)
        found |= dict.fromkeys(late.lanes, f"last in the rollout: {done}, median {usual}")
    for row in report.stragglers:
        if row.stage == ROLLOUT and report.tail is not None:  # the tail says who was late there
            continue
        long = row.slowest_us - row.median_us > Outlier.OF_THE_STEP * report.span_us
        if long and row.slowest_us > Outlier.SLOWER * row.median_us:
            others_us = 2 * row.median_us - row.slowest_us if row.workers == 2 else row.median_us
            took, usual = duration(row.slowest_us / 1e6), duration(others_us / 1e6)
            other = "the other one" if row.workers == 2 else "median"
            found.setdefault(row.slowest, f"slowest in {row.stage}: {took}, {other} {usual}")
    for call in report.collectives:
        lanes = sum(row.role == call.role for row in report.workers)
        cost = call.wait_us > Outlier.OF_THE_STEP * report.span_us * lanes
        if cost and call.late_share >= Outlier.LATE_SHARE and call.calls >= Outlier.LATE_CALLS:
            found.setdefault(call.late, f"last at {call.late_share:.0%} of {call.calls} {call.name[:40]}")
    for role in dict.fromkeys(row.role for row in report.workers):
        for lane, reason in _unlike([row for row in report.workers if row.role == role]):
            found.setdefault(lane, reason)
    return found


def _unlike(lanes: list[WorkerRow]) -> list[tuple[str, str]]:
    """Return the lanes whose busy share is far from that of their peers, the farthest first."""
    shares = {row.name: row.busy_us / row.span_us for row in lanes if row.span_us}
    if len(shares) < 3:
        return []
    usual = median(shares.values())
    spread = _NORMAL * median(abs(share - usual) for share in shares.values())
    limit = max(Outlier.SPREADS * spread, Outlier.POINTS)
    far = [name for name, share in shares.items() if abs(share - usual) > limit]
    far.sort(key=lambda name: -abs(shares[name] - usual))
    return [(name, f"busy {shares[name]:.0%}, median {usual:.0%}") for name in far]
