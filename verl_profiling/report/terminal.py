"""Prints a report and its tables on a terminal of 80 to 100 columns, without colour in a pipe.

Numbers are never wrapped, and long names are shortened with ``…``. At 100 columns, a report has at
most 45 lines, unless everything is requested.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl_profiling.report.console import WIDTH, fitting_console, table_of
from verl_profiling.report.findings import calm
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.phrases import counted, waits
from verl_profiling.report.summary_text import (
    figures,
    request_sentences,
    rollout_sentences,
    sentences,
)
from verl_profiling.report.tables import TABLES, Cell, cells, unshown, without_middle
from verl_profiling.units import visible

_FINDINGS = 2
_MOST_ROWS = 64  # of each table with ``--all``
_FIRST = {"what_would_help": 3, "suspects": 6, "stages": 6, "trajectory_causes": 4, "lost": 3}
"""Tables of the first screen, each with its largest number of rows."""
_LEAST = 16
"""Least length that a cell is shortened to on the first screen."""
_TYPED = "what-if"
"""Heading of options, which are never shortened, so that they can be typed."""
_PROBLEMS = 2
_BEFORE_UNIT, _JOIN = re.compile(r"(?<=\d) (?=(?:s|ms|us|ns)\b)"), "\ue000"


def print_report(report: Report, console: Console, *, everything: bool = False) -> None:
    """Print ``report`` on ``console``.

    Args:
        report: The report of a step.
        console: Where to print it.
        everything: Print every table and sentence, instead of the first screen only.
    """
    console = fitting_console(console)
    policy = ""
    if report.policy_version is not None:
        policy = f", policy version {report.policy_version}"
    console.print(f"[bold]{escape(report.title)}[/bold]{policy}")
    for line in request_sentences(report.capture_request):
        console.print(_wrapped(f"[dim]{escape(line)}[/dim]", console))
    if not report.complete:
        console.print(
            "[yellow]The step ended early; this report covers the recorded part.[/yellow]"
        )
    for figure in figures(report):
        line = f"{figure.title}: [bold]{figure.value}[/bold], {escape(figure.line)}"
        console.print(_wrapped(line, console))
    if everything:
        _print_findings(report, console, report.findings)
        for name in TABLES:
            _print_table(report, name, console, everything=True)
        console.print()
        for line in _all_lines(report):
            console.print(line)
        return
    for line in waits(report.watched, report.what_would_help):
        console.print(_wrapped(escape(line), console))
    _print_findings(report, console, report.findings[:_FINDINGS])
    for name in _first(report):
        _print_table(report, name, console, everything=False)
    console.print()
    problems = _problems(report)
    for line in problems[:_PROBLEMS]:
        console.print(line)
    left_out = {"finding": len(report.findings) - _FINDINGS, "note": len(problems) - _PROBLEMS}
    more = [counted(number, f"more {what}") for what, number in left_out.items() if number > 0]
    if more:
        console.print(f"[dim]{' and '.join(more)}: --all[/dim]")
    console.print(
        "[dim]a lane is a process with its device; all tables: --all, --save, --csv, --json[/dim]"
    )


def print_table(
    console: Console,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    note: str = "",
    dim: Sequence[bool] = (),
    *,
    one_line: bool = False,
) -> None:
    """Print a table, if there are rows.

    Args:
        console: Where to print it.
        title: Heading of the table.
        headings: Headings of the columns; a long heading of several words has two lines.
        rows: A cell for each column.
        note: Sentence below the table.
        dim: Whether to print each row dim.
        one_line: Whether to shorten texts until each row has one line at 100 columns.
    """
    if not rows:
        return
    heads = ["\n".join(head.rsplit(" ", 1)) if len(head) > 9 else head for head in headings]
    columns = enumerate(zip(*rows, strict=True))
    texts = {at for at, cells in columns if all(map(_is_text, cells))}
    table = table_of(title, heads, texts)
    lines = [[visible(cell.text) for cell in row] for row in rows]
    cut = {at for at, heading in enumerate(headings) if heading != _TYPED}
    _cut_middles(lines, cut - {0})
    if one_line:
        _shorten(heads, lines, sorted(cut & texts))
    for number, line in enumerate(lines):
        table.add_row(*map(escape, line), style="dim" if dim and dim[number] else None)
    console.print()
    console.print(table)
    if note:
        console.print(f"[dim]{escape(note)}[/dim]")


def _cut_middles(lines: Sequence[list[str]], columns: set[int]) -> None:
    for line in lines:
        for at in columns:
            line[at] = without_middle(line[at])


def _is_text(cell: Cell) -> bool:
    return isinstance(cell.value, str | bool | list | None)


def _shorten(heads: Sequence[str], lines: Sequence[list[str]], texts: Sequence[int]) -> None:
    """Shorten texts in the middle until each line fits 100 columns, one column after another."""
    columns = ([*head.split("\n"), *column] for head, *column in zip(heads, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    for at in texts:
        most = max(min(widths[at], _LEAST), widths[at] - max(over, 0))
        over -= widths[at] - most
        for line in lines:
            line[at] = without_middle(line[at], most)


def _first(report: Report) -> list[str]:
    """Return the names of the first screen's tables.

    With trajectories, ``trajectory_causes`` replaces ``lost``; with suspects, ``suspects`` replaces
    ``stages``.
    """
    waits = bool(report.rollout and report.rollout.causes)
    left_out = {
        "lost" if waits else "trajectory_causes",
        "stages" if report.suspects else "suspects",
    }
    return [name for name in _FIRST if name not in left_out]


def _print_table(report: Report, name: str, console: Console, *, everything: bool) -> None:
    table = TABLES[name]
    rows = table.rows_shown(report)
    brief = _MOST_ROWS if everything else _FIRST[name]
    if not everything:
        rows = [row for row in rows if not _is_detail(row)]
    headings, lines = cells(rows[:brief], brief=True)
    note = table.note_on(report, len(rows) - brief, ": --csv, --json")
    print_table(console, table.title, headings, lines, note, one_line=not everything)


def _is_detail(row: Any) -> bool:
    """Return whether a row is nested (e.g. a stage inside a stage), or of validation."""
    return bool(getattr(row, "depth", 0) or getattr(row, "validate", False))


def _print_findings(report: Report, console: Console, findings: Sequence[Finding]) -> None:
    grid = Table.grid(padding=(0, 1))
    said = calm(report)
    if said:
        grid.add_row("[green]•[/green]", said)
    for finding in findings:
        text = escape(finding.text)
        if finding.advice:
            text += f" [dim]Try: {escape(finding.advice)}.[/dim]"
        grid.add_row("[bold yellow]•[/bold yellow]", _wrapped(text, console, margin=2))
    console.print(grid)


def _wrapped(markup: str, console: Console, margin: int = 0) -> Text:
    """Return a sentence in lines that fit, in which each time stays on the line of its unit."""
    lines = Text.from_markup(_BEFORE_UNIT.sub(_JOIN, markup)).wrap(console, console.width - margin)
    for line in lines:
        line.plain = line.plain.replace(_JOIN, " ")
    return Text("\n").join(lines)


def _problems(report: Report) -> list[str]:
    """Return sentences on missing data, and notes."""
    missing = [f"[red]missing:[/red] {escape(text)}" for text in report.coverage.missing]
    return missing + [f"[yellow]note:[/yellow] {escape(note)}" for note in report.notes]


def _all_lines(report: Report) -> Iterator[str]:
    if report.rollout is not None:
        yield from map(escape, rollout_sentences(report.rollout))
    yield from map(escape, (*sentences(report), *unshown(report)))
    if report.metrics:
        numbers = [f"{name} {value:g}" for name, value in report.metrics.items()]
        more = ""
        if numbers[6:]:
            more = ", ... (all: --save, report.html)"
        yield escape(f"reported by the loop: {', '.join(numbers[:6])}{more}")
    yield from _problems(report)
