"""What ``top`` shows of a running job: a frame of the watch's latest steps."""

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
from verl_profiling.report.watch_history import IN_NO_STAGE, main_rows, was_read
from verl_profiling.units import byte_size, duration
from verl_profiling.visible import visible
from verl_profiling.watch_log import LoggedSpans, LoggedStage, LoggedStep, RoleMemory

__all__ = ["Pulse", "WatchFrame"]

_WIDEST = 100
_WITH_TREND = 84
_WITH_MEDIAN = 64
_WITH_SHARE = 48
_TREND = 20
_MANY_STAGES = 16
_MANY_ROLES = 16
_MANY_SPANS = 8


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
    """A frame; rich draws it as wide as the terminal, and without colours where there are none.

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
        width = min(options.max_width, _WIDEST)
        yield from console.render(Group(*self._drawn(width)), options.update_width(width))

    def _drawn(self, width: int) -> Iterator[Text | Table]:
        yield _line((self.run, "bold"), ": ", (self.pulse.says, "green" if self.pulse.is_well else "red"))
        if not self.steps:
            yield _line("No step has ended yet.")
        else:
            yield from self._steps_drawn(width)
        yield Text()
        yield from self._captures_drawn()
        if self.footer:
            yield _line((self.footer, "dim"))

    def _steps_drawn(self, width: int) -> Iterator[Text | Table]:
        latest = self.steps[-1]
        took = [step.seconds for step in self.steps]
        policy = "" if latest.policy_version is None else f", policy version {latest.policy_version}"
        captured = f", captured: {latest.captured}" if latest.captured else ""
        trend = sparkline(took, min(2 * _TREND, max(width - 10, 1)))
        yield _line(
            (f"step {latest.step}", "bold"),
            f": {duration(took[-1])}, median of {len(took)} {duration(median(took))}{policy}{captured}",
        )
        yield _line((trend, "cyan"))
        yield Text()
        yield self._stages(width)
        if led := _led(self._read):
            yield _line(led)
        if spent := next((step for step in reversed(self.steps) if step.spans), None):
            yield Text()
            yield self._spans(spent, width)
        known = {
            row.role: row for step in self.steps for row in step.memory if row.peak_bytes or row.held_bytes
        }
        if known:
            yield Text()
            yield _memory(known.values(), whole=width >= _WITH_MEDIAN)

    @property
    def _read(self) -> LoggedStep:
        """The latest step of which the workers were read; the latest one if there is none."""
        return next((step for step in reversed(self.steps) if was_read(step)), self.steps[-1])

    def _stages(self, width: int) -> Table:
        latest, read = self.steps[-1], self._read
        leads = "leads" if read is latest else f"leads (step {read.step})"
        headings = ["exposed"]
        headings += ["share"] if width >= _WITH_SHARE else []
        headings += ["median"] if width >= _WITH_MEDIAN else []
        headings += ["trend"] if width >= _WITH_TREND else []
        table = table_of("", "stage", *headings, leads)
        table.title = None
        table.columns[-1].justify = "left"
        table.columns[-1].no_wrap = False
        table.columns[-1].overflow = "fold"
        table.columns[0].min_width = table.columns[-1].min_width = min(width // 3, 12)
        for column in table.columns[1:-1]:
            column.min_width = 7
        if width >= _WITH_TREND:
            table.columns[-2].justify = "left"
        by_stage = [step.exposed_s for step in self.steps]
        rows = main_rows(read)
        seconds = by_stage[-1]
        kept = set(nlargest(_MANY_STAGES, seconds, key=lambda name: seconds[name]))
        for name in [name for name in seconds if name in kept]:
            values = [times.get(name, 0.0) for times in by_stage]
            share = seconds[name] / latest.seconds if latest.seconds else 0.0
            cells = [duration(seconds[name])]
            cells += [f"{share:.1%}"] if width >= _WITH_SHARE else []
            cells += [duration(median(values))] if width >= _WITH_MEDIAN else []
            cells += [sparkline(values, _TREND)] if width >= _WITH_TREND else []
            shown = [Text(visible(name) or IN_NO_STAGE), *map(Text, cells), Text(_leads(rows.get(name)))]
            table.add_row(*shown, style="dim" if not name else "")
        if (more := len(seconds) - _MANY_STAGES) > 0:
            table.add_row(Text(f"and {more} more"))
        return table

    def _spans(self, spent: LoggedStep, width: int) -> Table:
        headings = ["calls", "mean"]
        headings += ["failed"] if width >= _WITH_SHARE else []
        headings += ["median"] if width >= _WITH_MEDIAN else []
        headings += ["trend"] if width >= _WITH_TREND else []
        which = "" if spent is self.steps[-1] else f" (step {spent.step})"
        table = table_of("", f"in trajectories{which}", "total", *headings)
        table.title = None
        known = [{spans.name: spans.seconds for spans in step.spans} for step in self.steps if step.spans]
        for spans in spent.spans[:_MANY_SPANS]:
            values = [seconds.get(spans.name, 0.0) for seconds in known]
            cells = [duration(spans.seconds), f"{spans.runs:,}", _mean(spans)]
            cells += [f"{spans.failed:,}" if spans.failed else ""] if width >= _WITH_SHARE else []
            cells += [duration(median(values))] if width >= _WITH_MEDIAN else []
            cells += [sparkline(values, _TREND)] if width >= _WITH_TREND else []
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
    if row is None or not row.name:
        return ""
    if row.doubt == "one process" or not row.leader:
        return f"({row.doubt})"
    ahead = f" {duration(row.lead_ns / 1e9, signed=True)}" if row.lead_ns else ""
    doubt = f" ({row.doubt})" if row.doubt else ""
    return visible(f"{row.leader}{ahead}{doubt}")


def _mean(spans: LoggedSpans) -> str:
    return duration(spans.seconds / spans.runs) if spans.runs else ""


def _led(step: LoggedStep) -> str:
    """Return how much of a step the others wait for one process, where that is beyond doubt."""
    led_ns = sum(min(row.lead_ns, row.exposed_ns) for row in step.exposed if not row.doubt and row.leader)
    if not led_ns or not step.seconds:
        return ""
    return f"one process alone is late for {led_ns / 1e9 / step.seconds:.1%} of step {step.step}"


def _memory(rows: Iterable[RoleMemory], *, whole: bool) -> Table:
    table = table_of("", "memory", *(["processes"] if whole else []), "highest peak", "held", "of")
    table.title = None
    table.columns[-1].justify = "left"
    for row in islice(rows, _MANY_ROLES):
        sizes = [None if size is None else byte_size(size) for size in (row.peak_bytes, row.held_bytes)]
        count = [str(row.processes)] if whole else []
        table.add_row(Text(visible(row.role)), *count, *sizes, Text(visible(row.lane)))
    return table
