"""Prints a report: at most 100 columns, without colour when piped."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_profiling.report.model import Report, WorkerRow

__all__ = ["print_report"]

_WIDTH = 100
_BAR_CELLS = 24


def print_report(report: Report, console: Console) -> None:
    """Print ``report`` on ``console``."""
    width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console = Console(file=console.file, width=width, highlight=False)
    title = f"step {report.step}" if report.step is not None else Path(report.directory).name
    policy = f", policy version {report.policy_version}" if report.policy_version is not None else ""
    console.print(f"[bold]{escape(title)}[/bold]{policy}: {_seconds(report.span_us)} s")
    if not report.complete:
        console.print("[yellow]The step was left early: this is what was recorded until then.[/yellow]")
    if report.stages:
        console.print(_stage_table(report))
    engines = [row for row in report.workers if row.replica is not None]
    others = [row for row in report.workers if row.replica is None]
    for name, rows in (("Workers", others), ("Rollout engines", engines)):
        if rows:
            console.print(_worker_table(name, rows))
    if report.workers and not any(row.device for row in report.workers):
        console.print("[dim]CPU traces: busy means that operators or collectives ran on any thread.[/dim]")
    for clock in report.clocks:
        console.print(
            f"clock of {escape(clock.host)}: corrected by {clock.offset_us:,.1f} us, "
            f"true within {clock.error_us:,.1f} us, drift {clock.drift_us:,.1f} us"
        )
    coverage = report.coverage
    console.print(f"{coverage.read} of {coverage.expected} traces read, {coverage.events:,} events")
    for sentence in coverage.missing:
        console.print(f"[red]missing:[/red] {escape(sentence)}")
    for note in report.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}")


def _stage_table(report: Report) -> Table:
    table = Table(title="Step anatomy", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("stage", no_wrap=True)
    table.add_column("runs", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for row in report.stages:
        bar = f"[cyan]{'█' * round(row.share * _BAR_CELLS)}[/cyan]"
        name = escape("  " * row.depth + row.name)
        table.add_row(name, str(row.runs), _seconds(row.duration_us), f"{row.share:.1%}", bar)
    return table


def _worker_table(title: str, rows: list[WorkerRow]) -> Table:
    table = Table(title=f"{title} (seconds)", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    for heading in ("observed", "busy", "", "idle", "compute", "exposed comm", "copy"):
        table.add_column(heading, justify="right")
    for row in rows:
        share = row.busy_us / row.span_us if row.span_us else 0.0
        table.add_row(
            escape(row.name),
            _seconds(row.span_us),
            _seconds(row.busy_us),
            f"{share:.1%}",
            _seconds(row.idle_us),
            _seconds(row.compute_us),
            _seconds(row.exposed_communication_us),
            _seconds(row.memcpy_us),
        )
    return table


def _seconds(us: float) -> str:
    return f"{us / 1e6:.3f}"
