"""The first screen: a few large numbers with a line each, and what stands out."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from verl_profiling.report.model import OTHER_RANKS, Finding, Report
from verl_profiling.report.page.colours import stage_colour
from verl_profiling.units import duration

__all__ = ["figure", "figures", "summary"]

_LANES = 3


def summary(report: Report) -> str:
    """Return the figures of a step, and its findings of which the first is open."""
    early = (
        ""
        if report.complete
        else '<p class="early">The step ended early; this is what was recorded until then.</p>'
    )
    return f"{early}{figures(_figures(report))}{_findings(report)}"


def figures(items: Iterator[str]) -> str:
    """Return a row of figures."""
    return f'<section id="figures" aria-label="Main figures"><dl>{"".join(items)}</dl></section>'


def figure(title: str, value: str, line: str, key: str = "") -> str:
    """Return one figure.

    Args:
        title: What it is.
        value: The number, with its unit.
        line: What it consists of, as HTML.
        key: Class of the colour key before the line.
    """
    mark = f'<i class="{escape(key)}"></i>' if key else ""
    number, _, unit = value.partition(" ") if value.endswith("-seconds") else (value, "", "")
    small = f" <small>{unit}</small>" if unit else ""
    shown = f"<strong>{escape(number)}{small}</strong><span>{mark}{line}</span>"
    return f"<div><dt>{escape(title)}</dt><dd>{shown}</dd></div>"


def _figures(report: Report) -> Iterator[str]:
    coverage = report.coverage
    yield figure(
        "Step" if report.captured else "Recorded",
        duration(report.span_us / 1e6),
        f"{coverage.read} of {coverage.expected} traces read",
    )
    working = report.working_share
    if working is not None:
        observed_s = sum(row.span_us for row in report.counted) / 1e6
        waiting = report.lost_s.get(OTHER_RANKS, 0.0) / observed_s
        device = any(row.device for row in report.workers)
        title = "Accelerators busy" if device else "Lanes busy (CPU)"
        if report.shares_devices and not device:
            title = "Devices busy (CPU)"
        lanes = plural(len(report.workers), "lane")
        if report.shares_devices:
            lanes = f"{plural(len(report.devices), 'device')} ({lanes})"
        yield figure(title, f"{working:.0%}", f"of {lanes}, besides {waiting:.0%} waiting for other ranks")
        yield from _lost(report, observed_s)
    stages = [row for row in report.stages if row.depth == 0 and not row.name.startswith("(")]
    if stages:
        longest = max(stages, key=lambda row: row.duration_us)
        line = f"<bdi>{escape(longest.name)}</bdi>, {longest.share:.0%} of the step"
        key = f"s{stage_colour(longest.name)}"
        yield figure("Slowest stage", duration(longest.duration_us / 1e6), line, key)


def _lost(report: Report, observed_s: float) -> Iterator[str]:
    """Yield what was lost in idling and in waiting for other ranks, with its cause.

    That is the one which a finding names first, else the largest.
    """
    causes = report.lost_s
    lost = sum(causes.values())
    if lost:
        rules = [OTHER_RANKS if finding.rule == "straggler" else finding.rule for finding in report.findings]
        cause = next((rule for rule in rules if causes.get(rule)), max(causes, key=lambda name: causes[name]))
        part = f"{causes[cause] / lost:.0%} of it {escape(cause.replace('_', ' '))}"
        line = f"{lost / observed_s:.0%} of {report.whose} time; {part}"
        yield figure("Lost", report.lane_seconds(lost), line, f"k-{cause}")


def _findings(report: Report) -> str:
    items = [_sentence(finding, len(report.workers)) for finding in report.findings]
    first, *others = items or ["Nothing stands out: no finding is above its threshold."]
    more = "".join(f"<li>{item}</li>" for item in others)
    if others:
        more = f'<details><summary>{len(others)} more</summary><ol start="2">{more}</ol></details>'
    calm = "" if items else ' class="calm"'
    return f'<section id="findings"{calm} aria-label="Findings"><p>{first}</p>{more}</section>'


def _sentence(finding: Finding, lanes: int) -> str:
    """Return a finding with its advice, and its lanes where it names none and they are not all."""
    named = [name for name in finding.lanes if name not in finding.text] if len(finding.lanes) < lanes else []
    listed = ", ".join(named[:_LANES]) + (f" and {len(named) - _LANES} more" if len(named) > _LANES else "")
    where = f" <span>Where: {escape(listed)}.</span>" if listed else ""
    return f"{escape(finding.text)}{where} <span>Try: {escape(finding.advice)}.</span>"


def plural(count: int, what: str) -> str:
    """Return ``1 lane`` or ``2 lanes``."""
    return f"{count} {what}{'' if count == 1 else 's'}"
