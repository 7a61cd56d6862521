"""The list of a report's tables; their columns are in :mod:`verl_profiling.numbers.report_columns`.

A table has one name everywhere: ``kernels`` is a field of the JSON, a CSV file, a frame and a
heading. The name of a field ends with its unit (``_us``, ``_s``, ``share``, ``bytes``); any other
number has the ``unit`` of its row, if the row has one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from verl_profiling.numbers.idle_causes import CAUSES, cause_name
from verl_profiling.numbers.report_columns import (
    OTHER_RANKS,
    CauseRow,
    HelpRow,
    PathRow,
    Rollout,
    added,
)
from verl_profiling.report.colours import cause_key, stage_class
from verl_profiling.report.model import Report
from verl_profiling.steps.trajectory_columns import LOOP_LAG
from verl_profiling.steps.trajectory_spans import UNKNOWN
from verl_profiling.units import byte_size, duration, three_digits, visible


class Cell(NamedTuple):
    """A cell of a table: value to sort by, text to show, and address that the text links to."""

    value: Any
    text: str
    link: str = ""


def named(text: str, link: str = "") -> Cell:
    """Return the cell of a name, with a link; control characters in it are shown as escapes."""
    shown = visible(text)
    return Cell(shown, shown, link)


def said(text: str, link: str = "") -> Cell:
    """Return the cell of a sentence, which is never folded."""
    return Cell("", visible(text), link)


def without_middle(name: str, most: int = 44) -> str:
    """Return a name cut to ``most`` characters in the middle,
    because kernel names differ at both ends.
    """
    head = most * 2 // 3
    if len(name) <= most:
        return name
    return f"{name[:head]}…{name[head + 1 - most :]}"


def timed(seconds: float | None) -> Cell:
    """Return the cell of a duration; empty for ``None``."""
    return Cell(seconds, "" if seconds is None else duration(seconds))


class Table(NamedTuple):
    """A table of a report.

    Attributes:
        name: Name of the JSON field, the CSV file, the frame and (capitalized) the heading.
        note: Sentence below the table, or a function that returns the sentence.
        most: Maximum number of rows on the page.
        key: Function that returns the CSS class of a row's colour.
        field: Field of :class:`~verl_profiling.numbers.report_columns.Rollout` with the rows;
            empty for a field of the report.
        shown: Function that returns the shown rows, if they differ from the rows of the data.
        compares: What the table compares: ``parts`` of a whole, or ``peers`` that should be alike;
            see :meth:`rows_shown`.
    """

    name: str
    note: str | Callable[[Report], str] = ""
    most: int = 1000
    key: Callable[[Any], str] | None = None
    field: str = ""
    shown: Callable[[Report], Sequence[Any]] | None = None
    compares: Literal["", "parts", "peers"] = ""

    @property
    def title(self) -> str:
        """Heading of the table."""
        return self.name.replace("_", " ").capitalize()

    @property
    def row(self) -> type[msgspec.Struct]:
        """Class of the rows."""
        hints = get_type_hints(Rollout if self.field else Report)
        kind: type[msgspec.Struct] = get_args(hints[self.field or self.name])[0]
        return kind

    def rows(self, report: Report) -> Sequence[Any]:
        """Return the rows of the data (as in the JSON)."""
        part = report.rollout if self.field else report
        rows: Sequence[Any] = getattr(part, self.field or self.name, ())
        return rows

    def rows_shown(self, report: Report) -> Sequence[Any]:
        """Return the rows to show on the terminal and the page.

        A table that compares is not shown with one row, nor with peers that do not differ.
        """
        rows = self.shown(report) if self.shown else self.rows(report)
        if self.compares and len(rows) == 1:
            return ()
        if self.compares == "peers" and not _differ(rows):
            return ()
        return rows

    def note_on(self, report: Report, left_out: int, where: str) -> str:
        """Return the sentences below the table.

        Args:
            report: The report.
            left_out: Number of rows that are not shown.
            where: Text that says where these rows are, e.g. ``: --csv, --json``.
        """
        note = self.note if isinstance(self.note, str) else self.note(report)
        more = ""
        if left_out > 0:
            more = f"{left_out:,} more{where}."
        return " ".join(filter(None, (note, more)))


# of the larger; a choice: nobody looks into two ranks that differ by less
_ALIKE = 0.05


def _differ(rows: Sequence[Any]) -> bool:
    """Return whether the numbers of a shown column differ by more than 5%, or are not all known."""
    if not rows:
        return False
    for column in rows[0].columns.split(", "):
        field = _heading_and_field(column.lstrip("+"))[1]
        values = [getattr(row, field) for row in rows]
        numbers = [value for value in values if isinstance(value, int | float)]
        if numbers and len(numbers) < len(values):
            return True
        if numbers and max(numbers) - min(numbers) > _ALIKE * max(map(abs, numbers)):
            return True
    return False


def cells(rows: Sequence[Any], *, brief: bool = False) -> tuple[list[str], list[list[Cell]]]:
    """Return headings and cells of some rows, without empty columns; nothing if the rows have only
    names.

    Args:
        rows: The rows.
        brief: Whether to leave out the columns for the page only.
    """
    if not rows:
        return [], []
    columns = {}
    for column in rows[0].columns.split(", "):
        if not (brief and column.startswith("+")):
            heading, field = _heading_and_field(column.lstrip("+"))
            shown = [cell(field, row) for row in rows]
            if any(part.value for part in shown):
                columns[heading] = shown
    if len(columns) < 2:
        return [], []
    return list(columns), list(map(list, zip(*columns.values(), strict=True)))


def _heading_and_field(column: str) -> tuple[str, str]:
    heading, _, field = column.rpartition("=")
    return heading or re.sub(r"_(?:us|s)$", "", field).replace("_", " "), field


def cell(field: str, row: Any) -> Cell:
    """Return the cell of a row's field, in the unit of the field;
    names of nested stages are indented.
    """
    value = getattr(row, field)
    if value is None or isinstance(value, str):
        indent = 0
        if field in ("name", "cause"):
            indent = 2 * getattr(row, "depth", 0)
        return Cell(value, " " * indent + (value or ""))
    if isinstance(value, bool):
        return Cell(value, "yes" if value else "")
    if isinstance(value, list):
        return Cell(value, ", ".join(value))
    sign = ""
    if field.startswith(("change", "difference")) and value > 0:
        sign = "+"
    return Cell(value, sign + _number(value, field, getattr(row, "unit", "")))


def _number(value: float, field: str, unit: str) -> str:
    """Return a number in the unit of its field, else of its row."""
    if field.endswith("per_s"):
        return f"{byte_size(value)}/s"
    if field.endswith("_us"):
        return duration(value / 1e6)
    if field.endswith("_s") or field == "seconds" or unit == "s":
        return duration(value)
    if field.endswith("share") or unit == "share":
        return f"{value:.1%}"
    if unit.endswith("-hours"):
        return f"{three_digits(value)} {unit}"
    if field.endswith("bytes") or unit == "bytes":
        return byte_size(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.6g}"


_CURVES = ("load", "communication_load", "waiting_load")
_LEAST_PART = 0.0005  # share that is shown: 0.1% and more
# Of what a stage in half of its time would save. To balance two workers saves half of it, where one
# takes twice as long; a call that brings less does not stand for its stage.
_LARGE_PART = 0.4
_LOST = {cause: f"lost_{cause}_us" for cause in (*CAUSES, OTHER_RANKS)}


def fields_of(row: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the columns of files and data frames with their types: the step, then the fields of a
    row.

    ``lost_us`` of a worker becomes one column for each cause, and its traces one text.
    """
    columns: dict[str, Any] = {"step": int | None}
    for field in msgspec.structs.fields(row):
        if field.name == "lost_us":
            columns |= dict.fromkeys(_LOST.values(), float)
        elif field.name not in _CURVES:
            is_text = field.type in (list[str], dict[str, float])
            columns[field.name] = str if is_text else field.type
    return columns


def flat_rows(step: int | None, rows: Iterable[msgspec.Struct]) -> Iterator[dict[str, Any]]:
    """Yield rows with the columns of :func:`fields_of`; a list is joined to one text."""
    for row in rows:
        flat: dict[str, Any] = {"step": step}
        for name, value in msgspec.structs.asdict(row).items():
            if name == "lost_us":
                flat |= {column: value[cause] for cause, column in _LOST.items() if value}
            elif name not in _CURVES:
                flat[name] = _flat(value)
        yield flat


def _flat(value: Any) -> Any:
    """Return a list or dictionary as one text, and other values as they are."""
    if isinstance(value, dict):
        value = [f"{part} {seconds:.6g}" for part, seconds in value.items()]
    if isinstance(value, list):
        return "; ".join(value)
    return value


class _Part(msgspec.Struct, frozen=True):
    """A row of the table ``lost``: a cause, or a part of a cause."""

    columns: ClassVar[str] = "name, time=seconds, share"

    name: str
    seconds: float
    share: float | None = None
    key: str = ""
    depth: int = 0


def _lost(report: Report) -> list[_Part]:
    rows = []
    for row in report.lost:
        rows.append(_Part(cause_name(row.cause), row.seconds, row.share, f"k-{row.cause}"))
        for name, seconds in sorted(row.parts.items(), key=lambda part: -part[1]):
            share = row.share * seconds / (row.seconds or 1.0)
            if share >= _LEAST_PART:
                rows.append(_Part(name, seconds, share, cause_key(name), depth=1))
    return rows


def _causes(report: Report) -> list[CauseRow]:
    """Return the rows of trajectories' time by cause.

    The cause ``loop lag`` is named with the call that causes most of it.
    """
    if report.rollout is None:
        return []
    still_s: defaultdict[str, float] = defaultdict(float)
    for block in report.rollout.blocks:
        still_s[block.what] += block.stood_still_s
    blocker = max(still_s, key=still_s.__getitem__, default=UNKNOWN)
    lag = LOOP_LAG
    if blocker != UNKNOWN and 2 * still_s[blocker] > sum(still_s.values()):
        lag = f"{LOOP_LAG}: {blocker}"
    rows = []
    for row in report.rollout.causes:
        cause = row.cause
        if row.cause == LOOP_LAG:
            cause = lag
        rows.append(msgspec.structs.replace(row, cause=cause))
    return rows


def _helps(report: Report) -> list[HelpRow]:
    """Return the changes to show: of those that only make a stage shorter (``--scale``) the best
    one, unless another change of its stage saves a large part of that.
    """
    rows = [row for row in report.what_would_help if not _scales(row)]
    for best in filter(_scales, report.what_would_help):
        saved_us = [row.difference_us for row in rows if row.stage == best.stage]
        if min(saved_us, default=0.0) > _LARGE_PART * best.difference_us:
            rows.append(best)
        break
    return sorted(rows, key=lambda row: row.difference_us)


def _scales(row: HelpRow) -> bool:
    return row.option.startswith("--scale")


def summed(path: Iterable[PathRow]) -> list[PathRow]:
    """Return a row for each stage, process and kind of segment, in the order of the path."""
    rows: dict[tuple[str, str, str], PathRow] = {}
    for row in path:
        key = (row.stage, row.who, row.kind)
        if key in rows:
            row = added(rows[key], row)
        rows[key] = row
    return list(rows.values())


def _without_rewards(report: Report) -> str:
    if report.rollout is None or report.rollout.rewarded:
        return ""
    return "Without rewards, equal ones are unknown: made.add(reward=reward) in the trajectory."


def _key(row: Any) -> str:
    return cause_key(getattr(row, "cause", "") or row.name)


def _on_cpus(note: str) -> Callable[[Report], str]:
    return lambda report: "" if report.on_devices else note


_TABLES = (
    Table(
        "what_would_help",
        "Predicted: the step with one change; half of a time is an assumption.",
        most=3,
        shown=_helps,
    ),
    Table(
        "suspects", "Stage times exclude waits for other ranks; the rest are parts of the stage."
    ),
    Table("stages", key=lambda row: stage_class(row.name), compares="parts"),
    Table(
        "critical_path",
        "The work that made the step as long as it was; the times add up to the step.",
        shown=lambda report: sorted(summed(report.critical_path), key=lambda row: -row.duration_us),
    ),
    Table(
        "lost",
        lambda report: f"{report.whose.capitalize()}-seconds idle, or waiting for other ranks.",
        key=lambda row: row.key,
        shown=_lost,
    ),
    Table(
        "trajectory_causes",
        "Time of trajectories by the span or the wait that they were in.",
        key=_key,
        field="causes",
        shown=_causes,
    ),
    Table(
        "rollout_time",
        "Wall time of the rollout by cause.",
        key=_key,
        field="time",
        compares="parts",
    ),
    Table("trajectory_calls", "Calls of tools, and other spans.", key=_key, field="calls"),
    Table(
        "loop_blocks",
        "Calls that blocked event loops, and the trajectories that stood still meanwhile.",
        most=100,
        field="blocks",
    ),
    Table(
        "trajectory_groups", "Groups whose members waited most for the last member.", field="groups"
    ),
    Table(
        "trajectory_versions",
        "Versions of the weights that generated the training trajectories.",
        field="versions",
        compares="parts",
    ),
    Table("taught_nothing", _without_rewards, most=100, field="nothing"),
    Table(
        "useless_training",
        "Shares are of runs with known advantages, masks or reasons.",
        most=100,
    ),
    Table("trajectory_statuses", most=100, field="statuses", compares="parts"),
    Table("trajectory_failures", most=100, field="failures"),
    Table(
        "workers",
        _on_cpus("CPU traces: busy means that operators or collectives ran on any thread."),
        compares="peers",
    ),
    Table(
        "devices",
        "Lanes that share a device count once.",
        shown=lambda report: report.devices if report.shares_devices else (),
        compares="peers",
    ),
    Table("engines", compares="peers"),
    Table("replicas", compares="peers"),
    Table("stragglers"),
    Table("work", "Lengths are of prompt and response, without padding.", compares="peers"),
    Table(
        "achieved",
        "Of peak: dense bfloat16; without what is computed again, and without padding.",
        compares="peers",
    ),
    Table("collectives"),
    Table(
        "links",
        "Times are of the last rank, without waits. Unknown bandwidths say the fact that is "
        "missing.",
        most=100,
    ),
    Table("kernels", _on_cpus("CPU traces: the rows are operators instead of kernels."), most=40),
    Table("measures", "If a stage ran several times, the largest value is shown."),
    Table("counters", "A sample is valid until the next sample; the mean is over time."),
    Table(
        "around_the_step",
        "Time before and after the step, which no other table contains. In the pauses, the loop "
        "waits for the capture to start and to stop.",
    ),
    Table("costs", "Writing is part of stopping."),
)
TABLES: Mapping[str, Table] = {table.name: table for table in _TABLES}
"""The tables, in the order in which they are shown."""


def unshown(report: Report) -> Iterator[str]:
    """Yield the sentence that names the tables which have rows, but no difference to show."""
    names = [table.name for table in _TABLES if table.compares and table.rows(report)]
    names = [name for name in names if not TABLES[name].rows_shown(report)]
    if names:
        shown = ", ".join(name.replace("_", " ") for name in names)
        yield f"not shown, as there is nothing to compare: {shown}; --csv and --json have them"
