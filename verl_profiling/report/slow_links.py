"""The bandwidth of collectives as sentences, and links that are slower than the others."""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from statistics import median

from verl_profiling.manifest import BUCKET
from verl_profiling.numbers.bandwidth import SIZE_CLASS_BITS
from verl_profiling.numbers.report_columns import LinkRow
from verl_profiling.report import finding_measures
from verl_profiling.report.finding_measures import Loss
from verl_profiling.report.model import Report
from verl_profiling.report.phrases import counted
from verl_profiling.slices.intervals import grouped
from verl_profiling.units import byte_size

_SLOW = 0.5  # of the other pairs' bandwidth: equal links differ by less, also on a busy machine
_LEAST_OTHERS = 2  # of two pairs that differ, either one may be the usual one


def communication(report: Report) -> Iterator[Loss]:
    """Yield the exposed communication, with the bandwidth of the collective that took longest."""
    by_time = sorted(report.links, key=lambda row: row.duration_us)
    measured = [row for row in by_time if row.bus_bytes_per_s]
    longest = {row.reach: row for row in measured if row.name == measured[-1].name}
    parts = [f"{row.reach} {_speed(row.bus_bytes_per_s)}".strip() for row in longest.values()]
    sentence = ""
    if parts:
        sentence = f" The bus bandwidth of {measured[-1].name} is {'; '.join(parts)}."
    for loss in finding_measures.communication(report):
        yield loss._replace(text=loss.text + sentence)


def weight_sync(report: Report) -> Iterator[Loss]:
    """Yield the time lost to weight updates, with the speed of the slowest worker's buckets."""
    loss = finding_measures.idle(
        report, "weight_sync", "were idle while weights went to the engines"
    )
    buckets = [row for row in report.links if row.name.endswith(f" {BUCKET}")]
    if buckets:
        row = max(buckets, key=lambda row: row.duration_us)
        loss = loss._replace(
            text=f"{loss.text} {row.group} sent {byte_size(row.bytes or 0)} in "
            f"{counted(row.calls or 0, BUCKET)}, at {_speed(row.algorithm_bytes_per_s)}."
        )
    yield loss


def slow_links(report: Report) -> Iterator[Loss]:
    """Yield each pair of hosts, or of NPUs, that has at most half of the others' bandwidth in a
    collective with messages of similar size; likewise each group of more hosts.

    Its fastest calls count: a busy core makes some calls slow, and a slow link makes all.
    """
    measured = [row for row in report.links if row.pair and row.bus_bytes_per_s]
    for rows in grouped(measured, _kind).values():
        pairs = grouped(rows, lambda row: row.pair)
        for pair, of_pair in pairs.items():
            others = [_bus(row) for row in rows if row.pair != pair]
            best = max(row.best_bytes_per_s or 0.0 for row in of_pair)
            if len(pairs) <= _LEAST_OTHERS or best > _SLOW * median(others):
                continue
            speed, usual = median(map(_bus, of_pair)), median(others)
            lost_us = (1 - speed / usual) * sum(row.duration_us * row.ranks for row in of_pair)
            link, alike = "The link", "pairs"
            if rows[0].hosts > 2:
                link, alike = "A link of", "groups"
            text = (
                f"{link} {pair} is slow: {rows[0].name} runs over it with {_speed(speed)}, over "
                f"the other {alike} with {_speed(usual)}, which is "
                f"{report.lane_seconds(lost_us / 1e6)}."
            )
            yield Loss(text, lost_us / 1e6, [], lost_us / report.observed_us)


def _kind(row: LinkRow) -> tuple[str, str, int, int]:
    size_class = int(log2(row.call_bytes or 1)) // SIZE_CLASS_BITS
    return row.name, row.reach, row.hosts, size_class


def _bus(row: LinkRow) -> float:
    return row.bus_bytes_per_s or 0.0


def _speed(bytes_per_s: float | None) -> str:
    return f"{byte_size(bytes_per_s or 0)}/s"
