"""Prints a report: at most 100 columns, without colour when piped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_profiling.report.model import CostRow, MeasureRow, Report, StageRow, Tail, WorkerRow

__all__ = ["print_report", "rollout_sentence"]

_WIDTH = 100
_BAR_CELLS = 24
_ROWS = 8
_METRICS = 6
_NAME = 48


def print_report(report: Report, console: Console) -> None:
    """Print ``report`` on ``console``."""
    width = min(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console = Console(file=console.file, width=width, highlight=False)
    title = f"step {report.step}" if report.step is not None else Path(report.directory).name
    policy = f", policy version {report.policy_version}" if report.policy_version is not None else ""
    console.print(f"[bold]{escape(title)}[/bold]{policy}: {_seconds(report.span_us)} s")
    if not report.complete:
        console.print("[yellow]The step ended early; this is what was recorded until then.[/yellow]")
    findings = Table.grid(padding=(0, 1))
    for finding in report.findings:
        findings.add_row(
            "[bold yellow]•[/bold yellow]",
            f"{escape(finding.text)} [dim]Try: {escape(finding.advice)}.[/dim]",
        )
    console.print(findings)
    engines = [row for row in report.workers if row.replica is not None]
    others = [row for row in report.workers if row.replica is None]
    for table in (
        _stages(report.stages),
        _workers("Workers", others),
        _workers("Rollout engines", engines),
        _engines(report),
        _lost(report),
        _stragglers(report),
        _ops(report),
        _measures(report),
    ):
        if table.row_count:
            console.print(table)
    if report.workers and not any(row.device for row in report.workers):
        console.print("[dim]CPU traces: busy means that operators or collectives ran on any thread.[/dim]")
    for line in _closing_lines(report):
        console.print(line)


def quantity(name: str, value: float) -> str:
    """Return a number with the unit that its name ends in."""
    if not name.endswith("_bytes"):
        return f"{value:,.6g}"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _closing_lines(report: Report) -> Iterator[str]:
    if tail := report.tail:
        yield rollout_sentence(tail)
        if tail.latency_s and tail.response_tokens:
            latency, tokens = tail.latency_s, tail.response_tokens
            yield (
                f"{tail.requests} requests: latency p50 {latency.p50:.2f} s, p99 {latency.p99:.2f} s; "
                f"response p50 {tokens.p50:.0f}, p99 {tokens.p99:.0f} tokens"
            )
    if report.weight_sync_share:
        yield f"weight sync: {report.weight_sync_share:.1%} of the step"
    if rate := report.throughput:
        yield (
            f"{rate.tokens:,.0f} tokens ({rate.source}): {rate.tokens_per_s:,.0f} per second, "
            f"{rate.tokens_per_s_per_lane:,.0f} per second and lane"
        )
    if report.costs:
        yield escape(_cost_sentence(report.costs))
    for clock in report.clocks:
        yield (
            f"clock of {escape(clock.host)}: corrected by {clock.offset_us:,.1f} us, "
            f"accurate to {clock.error_us:,.1f} us, drift {clock.drift_us:,.1f} us"
        )
    if report.metrics:
        some = ", ".join(
            f"{escape(name)} {value:g}" for name, value in list(report.metrics.items())[:_METRICS]
        )
        more = ", ... (all: --save, report.html)" if len(report.metrics) > _METRICS else ""
        yield f"reported by the loop: {some}{more}"
    coverage = report.coverage
    yield f"{coverage.read} of {coverage.expected} traces read, {coverage.events:,} events"
    yield from (f"[red]missing:[/red] {escape(sentence)}" for sentence in coverage.missing)
    yield from (f"[yellow]note:[/yellow] {escape(note)}" for note in report.notes)


def rollout_sentence(tail: Tail) -> str:
    """Return a sentence on when the replicas were done."""
    last = _seconds(tail.last_finish_us)
    if tail.replicas == 1:
        return f"rollout: the only replica was done after {last} s"
    return (
        f"rollout: the last of {tail.replicas} replicas was done after {last} s, {tail.ratio:.2f} times the "
        f"median; {tail.tail_share:.1%} of the step lies between"
    )


def _stages(rows: list[StageRow]) -> Table:
    table = _table("Step anatomy", "stage", "runs", "seconds", "share", "")
    table.columns[-1].justify = "left"
    for row in rows:
        bar = f"[cyan]{'█' * round(min(row.share, 1.0) * _BAR_CELLS)}[/cyan]"
        name = escape("  " * row.depth + row.name)
        table.add_row(name, str(row.runs), _seconds(row.duration_us), f"{row.share:.1%}", bar)
    return table


def _workers(title: str, rows: list[WorkerRow]) -> Table:
    headings = ("observed", "busy", "", "idle", "host-bound", "compute", "exposed comm", "copy")
    table = _table(f"{title} (seconds)", "name", *headings)
    for row in rows:
        share = row.busy_us / row.span_us if row.span_us else 0.0
        times = (row.idle_us, row.host_bound_us, row.compute_us, row.exposed_communication_us, row.memcpy_us)
        table.add_row(
            escape(row.name),
            _seconds(row.span_us),
            _seconds(row.busy_us),
            f"{share:.1%}",
            *map(_seconds, times),
        )
    return table


def _engines(report: Report) -> Table:
    headings = (
        "iterations",
        "prefill s",
        "decode s",
        "prompt tok",
        "new tok",
        "queueing s",
        "finish s",
    )
    table = _table("Engine iterations", "name", *headings)
    for row in report.engines:
        if row.iterations:
            table.add_row(
                escape(row.name),
                f"{row.iterations:,}",
                _seconds(row.prefill_us),
                _seconds(row.decode_us),
                f"{row.prefill_tokens:,}",
                f"{row.decode_tokens:,}",
                "" if row.queueing_us is None else _seconds(row.queueing_us),
                "" if row.finish_us is None else _seconds(row.finish_us),
            )
    return table


def _lost(report: Report) -> Table:
    table = _table("Idle time by cause (all lanes)", "cause", "lane-seconds", "share")
    for row in report.lost:
        table.add_row(row.cause.replace("_", " "), f"{row.seconds:.3f}", f"{row.share:.1%}")
    return table


def _stragglers(report: Report) -> Table:
    table = _table("Stragglers", "stage", "slowest", "seconds", "median", "others waited")
    for row in report.stragglers[:_ROWS]:
        times = (row.slowest_us, row.median_us, row.wait_us)
        table.add_row(escape(row.stage), escape(row.slowest), *map(_seconds, times))
    return table


def _ops(report: Report) -> Table:
    table = _table(
        "Kernels (operators, in a CPU trace) by self time", "stage", "name", "calls", "seconds", "share"
    )
    table.columns[1].justify = "left"
    for row in report.ops[:_ROWS]:
        name = row.name if len(row.name) <= _NAME else f"{row.name[: _NAME - 1]}…"
        table.add_row(
            escape(row.stage), escape(name), f"{row.calls:,}", _seconds(row.self_us), f"{row.share:.1%}"
        )
    return table


def _measures(report: Report) -> Table:
    table = _table("Peaks and other numbers by stage", "stage", "number", "largest", "of worker", "smallest")
    table.columns[1].justify = "left"
    rows: dict[tuple[str, str], list[MeasureRow]] = {}
    for row in report.measures:
        rows.setdefault((row.stage, row.name), []).append(row)
    for (stage, name), peers in rows.items():
        most, least = (choose(peers, key=lambda row: row.value) for choose in (max, min))
        cells = (name, quantity(name, most.value), most.worker, quantity(name, least.value))
        table.add_row(escape(stage), *map(escape, cells))
    return table


def _cost_sentence(rows: list[CostRow]) -> str:
    """Say what the capture cost the worker that it cost most, and all of them on disk."""
    most = max(rows, key=lambda row: row.start_s + row.stop_s)
    return (
        f"capture: {most.worker} took longest: {most.start_s:.3f} s to start, {most.stop_s:.3f} s to stop "
        f"({most.export_s:.3f} s writing); {quantity('_bytes', sum(row.bytes for row in rows))} on disk"
    )


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _seconds(us: float) -> str:
    return f"{us / 1e6:.3f}"
