"""A frame of ``top``: the watch's latest steps of a running job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from statistics import median

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from verl_profiling.report.captures_so_far import CaptureSoFar
from verl_profiling.report.columns import table_of
from verl_profiling.report.sparkline import sparkline
from verl_profiling.report.watch_history import IN_NO_STAGE, main_rows
from verl_profiling.units import byte_size, duration
from verl_profiling.visible import visible
from verl_profiling.watch_log import LoggedSpans, LoggedStage, LoggedStep, RoleMemory

_WIDTH = 100
_TREND = 20
_MANY_STAGES = 16
_MANY_ROLES = 16
_MANY_SPANS = 8
_OF_SPANS = ("calls", "mean", "failed", "median", "trend")


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the run lives.

    Attributes:
        says: That, as a sentence.
        is_over: Whether no step will follow.
        is_well: Whether it ended as it should, if it is over.
    """

    says: str
    is_over: bool = False
    is_well: bool = True


class WatchFrame(msgspec.Struct, frozen=True, kw_only=True):
    """A frame, 100 columns wide; rich draws it without colours where there are none.

    Attributes:
        run: Name of the run's folder.
        pulse: Whether it lives.
        steps: The latest steps, in order.
        captures: How many step folders there are.
        latest: The latest of these.
        footer: How to leave.
    """

    run: str
    pulse: Pulse
    steps: Sequence[LoggedStep] = ()
    captures: int = 0
    latest: Sequence[CaptureSoFar] = ()
    footer: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw it."""
        yield from console.render(Group(*self._drawn()), options.update_width(min(options.max_width, _WIDTH)))

    def _drawn(self) -> Iterator[Text | Table]:
        yield _line((self.run, "bold"), ": ", (self.pulse.says, "green" if self.pulse.is_well else "red"))
        if not self.steps:
            yield _line("No step has ended yet.")
        else:
            yield from self._steps_drawn()
        yield Text()
        yield from self._captures_drawn()
        if self.footer:
            yield _line((self.footer, "dim"))

    def _steps_drawn(self) -> Iterator[Text | Table]:
        latest = self.steps[-1]
        took = [step.seconds for step in self.steps]
        policy = "" if latest.policy_version is None else f", policy version {latest.policy_version}"
        captured = f", captured: {latest.captured}" if latest.captured else ""
        trend = sparkline(took, 2 * _TREND)
        yield _line(
            (f"step {latest.step}", "bold"),
            f": {duration(took[-1])}, median of {len(took)} {duration(median(took))}{policy}{captured}",
        )
        yield _line((trend, "cyan"))
        yield Text()
        yield self._stages()
        if led := _led(latest):
            yield _line(led)
        if spent := next((step for step in reversed(self.steps) if step.spans), None):
            yield Text()
            yield self._spans(spent)
        known = {
            row.role: row for step in self.steps for row in step.memory if row.peak_bytes or row.held_bytes
        }
        if known:
            yield Text()
            yield _memory(known.values())

    def _stages(self) -> Table:
        latest = self.steps[-1]
        table = table_of("", "stage", "exposed", "share", "median", "trend", "leads")
        table.title = None
        table.columns[-1].justify = "left"
        table.columns[-1].no_wrap = False
        table.columns[-1].overflow = "fold"
        table.columns[-2].justify = "left"
        by_stage = [step.exposed_s for step in self.steps]
        rows = main_rows(latest)
        seconds = by_stage[-1]
        kept = set(nlargest(_MANY_STAGES, seconds, key=lambda name: seconds[name]))
        for name in [name for name in seconds if name in kept]:
            values = [times.get(name, 0.0) for times in by_stage]
            share = seconds[name] / latest.seconds if latest.seconds else 0.0
            cells = [duration(seconds[name]), f"{share:.1%}", duration(median(values))]
            cells.append(sparkline(values, _TREND))
            shown = [Text(visible(name) or IN_NO_STAGE), *map(Text, cells), Text(_leads(rows.get(name)))]
            table.add_row(*shown, style="dim" if not name else "")
        if (more := len(seconds) - _MANY_STAGES) > 0:
            table.add_row(Text(f"and {more} more"))
        return table

    def _spans(self, spent: LoggedStep) -> Table:
        which = "" if spent is self.steps[-1] else f" (step {spent.step})"
        table = table_of("", f"in trajectories{which}", "total", *_OF_SPANS)
        table.title = None
        known = [{spans.name: spans.seconds for spans in step.spans} for step in self.steps if step.spans]
        for spans in spent.spans[:_MANY_SPANS]:
            values = [seconds.get(spans.name, 0.0) for seconds in known]
            cells = [duration(spans.seconds), f"{spans.runs:,}", _mean(spans)]
            cells += [f"{spans.failed:,}" if spans.failed else "", duration(median(values))]
            cells.append(sparkline(values, _TREND))
            table.add_row(Text(visible(spans.name)), *map(Text, cells))
        if (more := len(spent.spans) - _MANY_SPANS) > 0:
            table.add_row(Text(f"and {more} more"))
        return table

    def _captures_drawn(self) -> Iterator[Text]:
        many = f"{self.captures} captures" if self.captures > 1 else "1 capture"
        newest = f", the latest {len(self.latest)}:" if self.captures > len(self.latest) else ":"
        yield _line((f"{many}{newest}" if self.captures else "no capture so far", "bold"))
        for capture in self.latest:
            yield _line(f"  {capture.folder}: {capture.asked}")


def _line(*parts: str | tuple[str, str]) -> Text:
    """Return a line that is cut off where the terminal ends."""
    shown = [visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts]
    return Text.assemble(*shown, no_wrap=True, overflow="ellipsis")


def _leads(row: LoggedStage | None) -> str:
    if row is None or not row.leader or not row.lead_ns:
        return ""
    return visible(f"{row.leader} {duration(row.lead_ns / 1e9, signed=True)}")


def _mean(spans: LoggedSpans) -> str:
    return duration(spans.seconds / spans.runs) if spans.runs else ""


def _led(step: LoggedStep) -> str:
    """Return how much of a step the others wait for one process."""
    led_ns = sum(min(row.lead_ns, row.exposed_ns) for row in step.exposed)
    if not led_ns or not step.seconds:
        return ""
    return f"one process alone is late for {led_ns / 1e9 / step.seconds:.1%} of step {step.step}"


def _memory(rows: Iterable[RoleMemory]) -> Table:
    table = table_of("", "memory", "processes", "highest peak", "held", "of")
    table.title = None
    table.columns[-1].justify = "left"
    for row in islice(rows, _MANY_ROLES):
        sizes = [None if size is None else byte_size(size) for size in (row.peak_bytes, row.held_bytes)]
        table.add_row(Text(visible(row.role)), str(row.processes), *sizes, Text(visible(row.lane)))
    return table
