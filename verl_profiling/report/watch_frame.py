"""Shows the log of a run's watch: a sentence on the steps, the captures so far, a frame of the
command ``top``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import nlargest
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from rich.console import Group
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from verl_profiling.capture_request import Trigger
from verl_profiling.files.opener import read_small
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_signs import IN_NO_STAGE
from verl_profiling.level_shifts import MATTERS, Series, noticed_from
from verl_profiling.manifest import MANIFEST_NAME, ManifestState, RunInfo
from verl_profiling.report.console import WIDTH, table_of
from verl_profiling.report.hand_offs import DEVICES, device_table, hand_off_sentence
from verl_profiling.report.phrases import axis_top, counted, short_of_cpu, sparkline, waits
from verl_profiling.steps.deaths import Death
from verl_profiling.steps.inputs import step_folders
from verl_profiling.steps.start_up import StartUp
from verl_profiling.units import byte_size, duration, visible

if TYPE_CHECKING:  # it takes a numerical library, and ``top`` is quick
    from verl_profiling.report.model import Report

_TREND = 20
_MANY_STAGES = 16
_MANY_SPANS = 8
_MANY_VARYING = 3
_MANY_NOTICED = 3
_MOST_RATIO = 10

STEP = "step"


def logged_steps(
    lines: Iterable[StepSummary], before: Iterable[StepSummary] = ()
) -> list[StepSummary]:
    """Return the steps of a run, in order.

    After a run resumed from an earlier step, repeated steps replace the earlier ones. Lines of a
    step that has not ended are left out: they are of a hang.

    Args:
        lines: Lines of the log, in order of logging.
        before: The steps of earlier lines.
    """
    steps = [*before]
    for line in lines:
        if not line.end_ns:
            continue
        while steps and steps[-1].step >= line.step:
            steps.pop()
        steps.append(line)
    return steps


def watch_sentence(steps: Sequence[StepSummary]) -> str:
    """Return a sentence on a run's steps, at least one: their number, the median, the longest."""
    took = [step.seconds for step in steps]
    index = slowest(took)
    first = ""
    if took[0] > took[index]:
        first = f"step {steps[0].step} with {duration(took[0])}, then "
    which = "1 step logged"
    if steps[1:]:
        which = f"{len(steps):,} steps logged, {steps[0].step} to {steps[-1].step}"
    longest = f"longest {first}step {steps[index].step} with {duration(took[index])}"
    why = ""
    largest = excess([step.exposed_s for step in steps], index)
    if largest:
        why = f" ({largest[0] or IN_NO_STAGE} {duration(largest[1], signed=True)})"
    return f"{which}; median {duration(median(took))}, {longest}{why}"


def seconds_of(step: StepSummary) -> dict[str, float]:
    """Return the time of a step, and the exposed time of its stages, by name (s)."""
    stages = {name or IN_NO_STAGE: seconds for name, seconds in step.exposed_s.items()}
    return {**stages, STEP: step.seconds}


def stage_seconds(report: Report) -> dict[str, float]:
    """Return the time of each outermost stage of the controller, and of the rest of the step."""
    return {row.name: row.duration_us / 1e6 for row in report.stages if row.depth == 0}


class CaptureHead(msgspec.Struct, frozen=True):
    """The beginning of a manifest: who requested the capture, and whether it is still open."""

    state: ManifestState = "written"
    trigger: Trigger = Trigger()
    step: int | None = None

    def in_words(self) -> str:
        """Return who requested the capture, and why."""
        trigger = self.trigger
        by = ""
        if trigger.by and trigger.by not in trigger.reason:
            by = f" by {trigger.by}"
        reason = ""
        if trigger.reason:
            reason = f": {trigger.reason}"
        return f"{trigger.kind}{by}{reason}{' (still open)' if self.state == 'begun' else ''}"


def capture_heads(run: Path) -> dict[str, CaptureHead | None]:
    """Return the captures of a run by folder, in order; ``None`` for one without a manifest."""
    return {folder.name: _head(folder) for folder in step_folders(run)}


def captures_so_far(run: Path, most: int) -> tuple[int, dict[str, str]]:
    """Return the number of a run's step folders, and who requested each of the latest captures, in
    order.

    Args:
        run: The run's folder.
        most: Maximum number of captures to read.
    """
    try:
        folders = step_folders(run)
    except OSError:
        return 0, {}
    latest = {}
    for folder in folders[-most:]:
        head = _head(folder)
        latest[folder.name] = head.in_words() if head else "no manifest yet"
    return len(folders), latest


def _head(folder: Path) -> CaptureHead | None:
    try:
        return msgspec.json.decode(read_small(folder / MANIFEST_NAME), type=CaptureHead)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def slowest(seconds: Sequence[float]) -> int:
    """Return the index of the longest step; a first step
    that is an outlier (warm-up) is ignored.
    """
    warms_up = seconds[0] > axis_top(seconds)
    return max(range(warms_up, len(seconds)), key=lambda index: seconds[index])


def excess(stages: Sequence[Mapping[str, float]], index: int) -> tuple[str, float] | None:
    """Return the stage that exceeds its median most in a step, and by how much (s).

    ``None`` if no stage does.
    """
    usual = {name: median(row.get(name, 0.0) for row in stages) for name in stages[index]}
    over = {name: took - usual[name] for name, took in stages[index].items()}
    name = max(over, key=lambda name: over[name], default=None)
    if name is None or over[name] <= 0:
        return None
    return (name, over[name])


class Thresholds(msgspec.Struct, frozen=True):
    """Thresholds of a run's watch, from its ``watch.trigger`` in ``run.json``.

    The default is a run without thresholds.

    Attributes:
        slow_stage: Ratio of a slow stage's exposed time to its median; ``None`` if switched off.
        window: Number of earlier steps that a step is compared with.
    """

    slow_stage: float | None = None
    window: int = 0


NO_THRESHOLDS = Thresholds()


def thresholds_of(info: RunInfo | None) -> Thresholds:
    """Return the thresholds with which a run detects slow stages."""
    watch = None
    if info is not None:
        watch = info.config.get("watch")
    with suppress(AttributeError, msgspec.ValidationError):
        return msgspec.convert(watch.get("trigger"), Thresholds)  # type: ignore[union-attr]
    return NO_THRESHOLDS


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """A run, as ``top`` shows it; the document of ``top --json``, and of ``report --json`` for a
    run.

    Attributes:
        run: Folder of the run.
        state: State of the run as text.
        hangs: A sentence on the step that hangs; empty if none does.
        is_over: Whether the run has ended.
        is_well: ``False`` if the state is a problem, e.g. the process of the run is gone.
        death: Who went first in a run that did not end well; ``None`` for any other.
        watch: The latest steps, in order, with the fields of ``watch.jsonl``.
        varying: Stages that vary so much that the watch detects only larger changes than its
            threshold. Each has the ratio to its median that is detected within 8 steps.
        captures: Number of step folders.
        latest: Who requested each of the latest captures, by folder.
        note: Advice on capturing a step, for a run without captures.
        start_up: The time before the first step; ``None`` if unknown.
    """

    run: Path
    state: str = ""
    hangs: str = ""
    is_over: bool = False
    is_well: bool = True
    death: Death | None = None
    watch: Sequence[StepSummary] = ()
    varying: Mapping[str, float] = {}
    captures: int = 0
    latest: Mapping[str, str] = {}
    note: str = ""
    start_up: StartUp | None = None


def watch_frame(view: RunView, footer: str = "") -> Constrain:
    """Return a frame of at most 100 columns, which rich draws without colours on a terminal without
    colours.

    Args:
        view: The run.
        footer: Last line, e.g. ``Ctrl-C quits``.
    """
    lines: list[Text | Table] = []
    if view.hangs:
        lines.append(Text(visible(view.hangs), "bold red"))
    state = (view.state, "green" if view.is_well else "red")
    lines.append(_line((view.run.resolve().name, "bold"), ": ", state))
    if view.death is not None:
        lines.append(_line((view.death.sentence(), "red")))
    if view.watch:
        lines.extend(_drawn(view))
    else:
        lines.append(_line("No step has ended yet."))
    if view.start_up is not None:
        lines += [Text(), Text(f"start-up: {visible(view.start_up.sentence())}")]
    if least := hand_off_sentence(view.watch):
        lines += [Text(), Text(f"device memory: {visible(least)}")]
    lines += [Text(), _line((_captures_line(view), "bold"))]
    lines.extend(_line(f"  {folder}: {trigger}") for folder, trigger in view.latest.items())
    lines.extend(_noticed(view.watch, view.latest.values()))
    if footer:
        lines.append(_line((footer, "dim")))
    return Constrain(Group(*lines), WIDTH)


def _captures_line(view: RunView) -> str:
    if not view.captures:
        return "no capture so far"
    captures = counted(view.captures, "capture")
    if view.watch and view.watch[-1].waits:
        return f"{captures}; an anomaly waits: {view.watch[-1].waits}"
    if view.captures > len(view.latest):
        return f"{captures}, the latest {len(view.latest)}:"
    return f"{captures}:"


def noticed_in(steps: Iterable[StepSummary]) -> list[tuple[Trigger, str]]:
    """Return the anomalies that the watch noticed, in order, each with the reason why its capture
    waits; the reason is empty if it does not wait.
    """
    anomalies: dict[int | None, tuple[Trigger, str]] = {}
    latest: Trigger | None = None
    for step in steps:
        latest = step.noticed or latest
        if latest is not None and (step.noticed or step.waits):
            anomalies[latest.noticed] = (latest, step.waits)
    return [*anomalies.values()]


def _noticed(steps: Sequence[StepSummary], captured: Iterable[str]) -> Iterator[Text]:
    """Yield the last anomalies without a capture in the list."""
    texts = " ".join(captured)
    rest = [(anomaly, why) for anomaly, why in noticed_in(steps) if anomaly.reason not in texts]
    for anomaly, why in rest[-_MANY_NOTICED:]:
        yield _line(f"noticed, not captured: {anomaly.reason}{f' (waits: {why})' if why else ''}")


def _drawn(view: RunView) -> Iterator[Text | Table]:
    steps = view.watch
    latest = steps[-1]
    took = [step.seconds for step in steps]
    policy = ""
    if latest.policy_version is not None:
        policy = f", policy version {latest.policy_version}"
    captured = ""
    if latest.captured:
        captured = f", captured: {latest.captured}"
    if view.death is not None and view.death.step == latest.step:
        captured += ", cut short"
    usual = f"median {duration(median(took))} of {counted(len(took), 'step')}"
    yield _line(
        (f"step {latest.step}", "bold"), f": {duration(took[-1])}, {usual}{policy}{captured}"
    )
    yield _line((sparkline(took, 2 * _TREND), "cyan"))
    yield Text()
    yield _stage_table(steps)
    yield from map(_line, waits(latest))
    if cpu := short_of_cpu(steps):
        yield _line((cpu, "yellow"))
    if view.varying:
        yield _line(_varying_sentence(view.varying))
    for table in (_span_table(steps), _memory_table(steps), device_table(steps)):
        if table.row_count:
            yield Text()
            yield table


def tables_of(steps: Sequence[StepSummary]) -> dict[str, Table]:
    """Return the tables of stages, of spans, and of memory, by title.

    Args:
        steps: The latest steps, at least one.
    """
    return {
        "Time by stage": _stage_table(steps),
        "Spans": _span_table(steps),
        "Memory": _memory_table(steps),
        DEVICES: device_table(steps),
    }


def _stage_table(steps: Sequence[StepSummary]) -> Table:
    latest = steps[-1]
    table = table_of("", ("stage", "exposed", "share", "median", "trend", "leads"), texts=(5,))
    by_stage = [step.exposed_s for step in steps]
    rows = {row.name: row for row in latest.exposed}
    seconds = by_stage[-1]
    kept = set(nlargest(_MANY_STAGES, seconds, key=lambda name: seconds[name]))
    for name in [name for name in seconds if name in kept]:
        values = [times.get(name, 0.0) for times in by_stage]
        share = 0.0
        if latest.seconds:
            share = seconds[name] / latest.seconds
        cells = [duration(seconds[name]), f"{share:.1%}", duration(median(values))]
        row = rows.get(name)
        leads = ""
        if row and row.lead_ns:
            leads = f"{row.leader} {duration(row.lead_ns / 1e9, signed=True)}"
        cells += [sparkline(values, _TREND), leads]
        table.add_row(*_texts(name or IN_NO_STAGE, *cells), style="dim" if not name else "")
    _add_more(table, len(seconds) - _MANY_STAGES)
    return table


def _span_table(all_steps: Sequence[StepSummary]) -> Table:
    steps = [step for step in all_steps if step.spans]
    if not steps:
        return Table()
    spent = steps[-1]
    which = ""
    if spent is not all_steps[-1]:
        which = f" (step {spent.step})"
    headings = (f"span{which}", "total", "calls", "mean", "failed", "median", "trend")
    table = table_of("", headings)
    known = [{spans.name: spans.seconds for spans in step.spans} for step in steps]
    for spans in spent.spans[:_MANY_SPANS]:
        values = [seconds.get(spans.name, 0.0) for seconds in known]
        mean = ""
        if spans.runs:
            mean = duration(spans.seconds / spans.runs)
        cells = [spans.name, duration(spans.seconds), f"{spans.runs:,}", mean]
        cells += [f"{spans.failed:,}" if spans.failed else "", duration(median(values))]
        table.add_row(*_texts(*cells, sparkline(values, _TREND)))
    _add_more(table, len(spent.spans) - _MANY_SPANS)
    return table


def _line(*parts: str | tuple[str, str]) -> Text:
    """Return a sentence, which is wrapped at the width of the terminal: its end may be the fact."""
    shown = [
        visible(part) if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts
    ]
    return Text.assemble(*shown)


def _texts(*cells: str) -> Iterator[Text]:
    return (Text(visible(cell)) for cell in cells)


def _add_more(table: Table, more: int) -> None:
    if more > 0:
        table.add_row(Text(f"and {more} more"))


def varying_stages(steps: Iterable[StepSummary], thresholds: Thresholds) -> dict[str, float]:
    """Return the stages that vary so much that the watch detects only larger changes.

    Args:
        steps: The steps of a run; captured ones do not count.
        thresholds: Thresholds of the run's watch.

    Returns:
        The detected ratio to the median for each stage, the largest first.
    """
    ratio = thresholds.slow_stage
    steps = [step for step in steps if not step.captured]
    if ratio is None or not steps:
        return {}
    by_stage = [step.exposed_s for step in steps]
    matters_s = MATTERS * median(step.seconds for step in steps)
    detected = {}
    for name in by_stage[-1]:
        values = [times[name] for times in by_stage if name in times]
        series = Series(thresholds.window)
        for value in values:
            if series.add(series.measure(value, ratio, matters_s)):
                series.notice()
        least = noticed_from(ratio, series.past.spread)
        if least > 1.1 * ratio and median(values) > matters_s:
            detected[name or IN_NO_STAGE] = least
    return dict(sorted(detected.items(), key=lambda item: -item[1]))


def _varying_sentence(varying: Mapping[str, float]) -> str:
    shown = []
    for name, ratio in islice(varying.items(), _MANY_VARYING):
        times = f"{ratio:.1f}" if ratio <= _MOST_RATIO else f"over {_MOST_RATIO}"
        shown.append(f"{name} {times} times")
    return f"varying stages: within 8 steps, detected only from {', '.join(shown)} the median"


def _memory_table(steps: Sequence[StepSummary]) -> Table:
    known = {
        row.role: row for step in steps for row in step.memory if row.peak_bytes or row.held_bytes
    }
    table = table_of("", ("memory", "processes", "highest peak", "held", "of"), texts=(4,))
    for row in known.values():
        peak, held = _size(row.peak_bytes), _size(row.held_bytes)
        table.add_row(*_texts(row.role, str(row.processes), peak, held, row.lane))
    return table


def _size(count: int | None) -> str:
    return "" if count is None else byte_size(count)
