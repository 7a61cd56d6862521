"""Prints a report: 80 to 100 columns, without colour when piped."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_profiling.report.asked import asked_sentence, compared, shown_history
from verl_profiling.report.columns import Sentence, fitting_console, shortened, table_of
from verl_profiling.report.model import Report, Tail, Throughput
from verl_profiling.report.outside import outside_sentences
from verl_profiling.report.rollout.terminal import rollout_sentences, rollout_tables
from verl_profiling.report.rows import AnchorRow, MeasureRow, WorkerRow
from verl_profiling.units import byte_size, duration

__all__ = ["print_report", "rollout_sentence", "tokens_sentence"]

_BAR_CELLS = 24
_ROWS = 8
_METRICS = 6
_PARTS = 4
_BESIDE = 0.01  # of the step: less is not worth a name
_DEVICE_HEADINGS = ("observed", "busy", "share", "host-bound", "exposed\ncomm", "device")


def print_report(report: Report, console: Console) -> None:
    """Print ``report`` on ``console``."""
    console = fitting_console(console)
    policy = f", policy version {report.policy_version}" if report.policy_version is not None else ""
    console.print(f"[bold]{escape(report.title)}[/bold]{policy}: {_time(report.span_us)}")
    if asked := report.asked:
        for line in filter(None, (asked_sentence(asked), shown_history(asked))):
            console.print(Sentence.of(f"[dim]{escape(line)}[/dim]"))
    if not report.complete:
        console.print("[yellow]The step ended early; this is what was recorded until then.[/yellow]")
    findings = Table.grid(padding=(0, 1))
    for finding in report.findings:
        findings.add_row(
            "[bold yellow]•[/bold yellow]",
            Sentence.of(f"{escape(finding.text)} [dim]Try: {escape(finding.advice)}.[/dim]"),
        )
    console.print(findings)
    engines = [row for row in report.workers if row.replica is not None]
    others = [row for row in report.workers if row.replica is None]
    for table in (
        _suspects(report),
        _stages(report),
        _workers("Workers", others),
        _workers("Rollout engines", engines),
        _devices(report),
        _engines(report),
        _replicas(report),
        _lost(report),
        *(rollout_tables(report.rollout) if report.rollout else ()),
        _stragglers(report),
        _ops(report),
        _measures(report),
        _counters(report),
    ):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()
    if report.workers and not any(row.device for row in report.workers):
        console.print("[dim]CPU traces: busy means that operators or collectives ran on any thread.[/dim]")
    for line in _closing_lines(report):
        console.print(Sentence.of(line))


def quantity(name: str, value: float) -> str:
    """Return a number with the unit that its name ends in."""
    if not name.endswith("_bytes"):
        return f"{value:,.6g}"
    return byte_size(value)


def _closing_lines(report: Report) -> Iterator[str]:
    yield from map(escape, outside_sentences(report.outside))
    if tail := report.tail:
        yield rollout_sentence(tail)
        if tail.latency_s and tail.response_tokens:
            latency, tokens = tail.latency_s, tail.response_tokens
            yield (
                f"{tail.requests} requests: latency p50 {duration(latency.p50)}, p99 "
                f"{duration(latency.p99)}; response p50 {tokens.p50:.0f}, p99 {tokens.p99:.0f} tokens"
            )
    if report.rollout:
        yield from map(escape, rollout_sentences(report.rollout))
    if report.weight_sync_share:
        yield f"weight sync: {report.weight_sync_share:.1%} of the step"
    if rate := report.throughput:
        yield escape(tokens_sentence(report, rate))
    if report.costs:
        yield escape(_cost_sentence(report))
    for clock in report.clocks:
        yield (
            f"clock of {escape(clock.host)}: corrected by {_time(clock.offset_us)}, "
            f"accurate to {_time(clock.error_us)}, drift {_time(clock.drift_us)}"
        )
    if report.anchors:
        yield escape(_anchor_sentence(report.anchors))
    if report.metrics:
        some = ", ".join(
            f"{escape(name)} {value:g}" for name, value in list(report.metrics.items())[:_METRICS]
        )
        more = ", ... (all: --save, report.html)" if len(report.metrics) > _METRICS else ""
        yield f"reported by the loop: {some}{more}"
    coverage = report.coverage
    yield f"{coverage.read} of {coverage.expected} traces read, {coverage.events:,} events{report.of_capture}"
    yield from (f"[red]missing:[/red] {escape(sentence)}" for sentence in coverage.missing)
    yield from (f"[yellow]note:[/yellow] {escape(note)}" for note in report.notes)


def tokens_sentence(report: Report, rate: Throughput) -> str:
    """Return a sentence on the step's tokens per second, and per device where lanes share any."""
    each, whose = rate.tokens_per_s_per_lane, "lane"
    if report.shares_devices and rate.tokens_per_s_per_device is not None:
        each, whose = rate.tokens_per_s_per_device, "device"
    return (
        f"{rate.tokens:,.0f} tokens ({rate.source}): {rate.tokens_per_s:,.0f} per second, "
        f"{each:,.0f} per second and {whose}"
    )


def rollout_sentence(tail: Tail) -> str:
    """Return a sentence on when the replicas were done."""
    last = _time(tail.last_finish_us)
    if tail.replicas == 1:
        return f"rollout: the only replica was done after {last}"
    return (
        f"rollout: the last of {tail.replicas} replicas was done after {last}, {tail.ratio:.2f} times the "
        f"median; {tail.tail_share:.1%} of the step lies between"
    )


def _suspects(report: Report) -> Table:
    table = table_of("Suspects beside their peers", "suspect", "what", "", "peers", "", "difference")
    table.columns[1].justify = table.columns[3].justify = "left"
    for row in report.suspects:
        value, peer, difference = compared(row)
        what = escape(shortened(f"{row.kind}: {row.name}"))
        table.add_row(escape(row.suspect), what, value, escape(row.peers), peer, difference)
    return table


def _stages(report: Report) -> Table:
    table = table_of("Step anatomy", "stage", "runs", "time", "share", "of the step")
    table.columns[-1].justify = "left"
    for row in report.stages:
        bar = f"[cyan]{'█' * round(min(row.share, 1.0) * _BAR_CELLS)}[/cyan]"
        name = escape("  " * row.depth + row.name)
        table.add_row(name, str(row.runs), _time(row.duration_us), f"{row.share:.1%}", bar)
    least_us = max(_BESIDE * report.span_us, 1e-3)
    beside = [
        f"{row.name} {_time(row.side_by_side_us)}" for row in report.stages if row.side_by_side_us >= least_us
    ]
    if beside:
        table.caption = escape(
            f"side by side with others: {', '.join(beside[:_ROWS])}; shares divide that time equally"
        )
    return table


def _workers(title: str, rows: list[WorkerRow]) -> Table:
    headings = ["observed", "busy", "share", "host-bound", "compute", "exposed\ncomm", "copies"]
    unrecognised = any(row.unrecognised_us for row in rows)
    table = table_of(title, "name", *headings, *(["unrecog-\nnised"] if unrecognised else []))
    for row in rows:
        share = row.busy_us / row.span_us if row.span_us else 0.0
        times = [row.host_bound_us, row.compute_us, row.exposed_communication_us, row.memcpy_us]
        times += [row.unrecognised_us] if unrecognised else []
        table.add_row(
            escape(row.name), _time(row.span_us), _time(row.busy_us), f"{share:.1%}", *map(_time, times)
        )
    return table


def _devices(report: Report) -> Table:
    """Return what devices did, if any has several lanes."""
    table = table_of("Devices, lanes that share one together", "lanes", *_DEVICE_HEADINGS)
    for row in report.devices if report.shares_devices else []:
        share = row.busy_us / row.span_us if row.span_us else 0.0
        times = map(_time, (row.host_bound_us, row.exposed_communication_us))
        table.add_row(
            escape(row.name),
            _time(row.span_us),
            _time(row.busy_us),
            f"{share:.1%}",
            *times,
            escape(row.place),
        )
    return table


def _engines(report: Report) -> Table:
    headings = (
        "iterations",
        "prefill",
        "decode",
        "prompt\ntokens",
        "new\ntokens",
        "queueing",
        "finish",
    )
    table = table_of("Engine iterations", "name", *headings)
    for row in report.engines:
        if row.iterations:
            table.add_row(
                escape(row.name),
                f"{row.iterations:,}",
                _time(row.prefill_us),
                _time(row.decode_us),
                f"{row.prefill_tokens:,}",
                f"{row.decode_tokens:,}",
                "" if row.queueing_us is None else _time(row.queueing_us),
                "" if row.finish_us is None else _time(row.finish_us),
            )
    return table


def _replicas(report: Report) -> Table:
    headings = (
        "requests",
        "queued\np99",
        "1st token\np50",
        "\np99",
        "a token\np50",
        "cached",
        "preempted",
    )
    table = table_of("Requests by replica", "name", *headings)
    for row in report.replicas[:_ROWS]:
        times = (
            row.queued_p99_us,
            row.to_first_token_p50_us,
            row.to_first_token_p99_us,
            row.per_token_p50_us,
        )
        table.add_row(
            escape(row.worker),
            f"{row.requests:,}",
            *("" if us is None else _time(us) for us in times),
            "" if row.cache_hit_share is None else f"{row.cache_hit_share:.0%}",
            "" if row.preemptions is None else f"{row.preemptions:,}",
        )
    table = _with_rest(table, len(report.replicas))
    if validation := sum(row.validation for row in report.replicas):
        more = f"{table.caption}; " if table.caption else ""
        table.caption = f"{more}besides {validation:,} of validation, which no number here counts"
    return table


def _lost(report: Report) -> Table:
    title = f"Lost time by cause (all {report.whose}s)"
    table = table_of(title, "cause", f"{report.whose}-seconds", "share")
    for row in report.lost:
        table.add_row(row.cause.replace("_", " "), duration(row.seconds), f"{row.share:.1%}")
        parts = sorted(row.parts.items(), key=lambda part: -part[1])
        listed = [(escape(shortened(name)), seconds) for name, seconds in parts[:_PARTS]]
        if rest := parts[_PARTS:]:
            listed.append((f"{len(rest)} more", sum(seconds for _, seconds in rest)))
        for name, seconds in listed:
            share = row.share * seconds / row.seconds if row.seconds else 0.0
            table.add_row(f"  {name}", duration(seconds), f"{share:.1%}")
    return table


def _stragglers(report: Report) -> Table:
    table = table_of("Stragglers", "stage", "slowest", "time", "median", "others waited")
    for row in report.stragglers[:_ROWS]:
        times = (row.slowest_us, row.median_us, row.wait_us)
        table.add_row(escape(row.stage), escape(row.slowest), *map(_time, times))
    return _with_rest(table, len(report.stragglers))


def _ops(report: Report) -> Table:
    title = "Kernels (operators, in a CPU trace) by self time"
    table = table_of(title, "stage", "name", "calls", "time", "share")
    table.columns[1].justify = "left"
    table.columns[1].no_wrap = False
    table.columns[1].overflow = "fold"
    for row in report.kernels[:_ROWS]:
        numbers = (f"{row.calls:,}", _time(row.self_us), f"{row.share:.1%}")
        table.add_row(escape(row.stage), escape(shortened(row.name)), *numbers)
    return _with_rest(table, len(report.kernels))


def _with_rest(table: Table, rows: int) -> Table:
    """Say below a table how many rows it does not show."""
    if rows > _ROWS:
        table.caption = f"{rows - _ROWS:,} more: --csv, --json"
    return table


def _measures(report: Report) -> Table:
    table = table_of(
        "Peaks and other numbers by stage", "stage", "number", "largest", "of worker", "smallest"
    )
    table.columns[1].justify = "left"
    rows: dict[tuple[str, str], list[MeasureRow]] = {}
    for row in report.measures:
        rows.setdefault((row.stage, row.name), []).append(row)
    for (stage, name), peers in rows.items():
        most, least = (choose(peers, key=lambda row: row.value) for choose in (max, min))
        cells = (name, quantity(name, most.value), most.worker, quantity(name, least.value))
        table.add_row(escape(stage), *map(escape, cells))
    return table


def _counters(report: Report) -> Table:
    table = table_of("Counts", "of", "count", "last", "mean", "largest")
    table.columns[1].justify = "left"
    for row in report.counters[:_ROWS]:
        numbers = (f"{number:,.6g}" for number in (row.last, row.mean, row.max))
        table.add_row(escape(row.lane), escape(shortened(row.name)), *numbers)
    return _with_rest(table, len(report.counters))


def _cost_sentence(report: Report) -> str:
    """Say what the capture added to the loop, cost the worker that it cost most, and takes on disk."""
    most = max(report.costs, key=lambda row: row.start_s + row.stop_s)
    return (
        f"capture: {_time(report.capture_us)} added to the loop; {most.worker} took longest: "
        f"{duration(most.start_s)} to start, {duration(most.stop_s)} to stop ({duration(most.export_s)} "
        f"writing); {byte_size(sum(row.bytes for row in report.costs))} on disk{report.of_capture}"
    )


def _anchor_sentence(rows: list[AnchorRow]) -> str:
    """Say over what time clocks were read, and which was set most."""
    most = max(rows, key=lambda row: abs(row.set_us))
    return (
        f"clocks of {len(rows)} worker(s), over {_time(max(row.end_us - row.begin_us for row in rows))}: "
        f"unix time moved by at most {_time(abs(most.set_us))} against monotonic time ({most.worker})"
    )


def _time(us: float) -> str:
    return duration(us / 1e6)
