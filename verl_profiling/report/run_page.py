"""Renders the page of a run: whether it is healthy, what changed when, and what to do; its steps,
and its captures with links to the pages of the steps.

A saved page and one that follows a run are the same, but for a script that fetches it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import median
from urllib.parse import quote

from rich.table import Table

from verl_profiling.files.run_files import HANGS, HangStacks, ended_hang, read_stacks
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.report.hand_offs import DEVICES, hand_off_sentence
from verl_profiling.report.health import Event, Health, events, health
from verl_profiling.report.html import document, figures_section, section, table
from verl_profiling.report.phrases import number, waits
from verl_profiling.report.run_steps import (
    LATEST,
    Bar,
    RunCapture,
    bars_section,
    capture_of,
    captured_steps,
    latest_steps,
    logged_bars,
    merged,
)
from verl_profiling.report.summary_text import Figure
from verl_profiling.report.tables import named, said, timed
from verl_profiling.report.watch_frame import RunView, excess, slowest, tables_of
from verl_profiling.steps.deaths import Attempt
from verl_profiling.steps.start_up import StartUp
from verl_profiling.units import byte_size, duration, local_time, visible

RUN_PAGE = "index.html"
_MOST_BARS = 300  # of about four pixels each
_NEAR = 100  # steps on each side of the slowest one, with which it is compared
_RECENT = 200  # steps in the tables, as in `top`
_MOST_CHANGES = 3  # sentences on the first screen; the tables have all
_MOST_EVENTS = 100
_MOST_HANGS = 10


def render_run(
    view: RunView,
    captures: Sequence[RunCapture],
    attempts: Sequence[Attempt] = (),
    *,
    follows: bool = False,
) -> str:
    """Return the page of a run.

    Args:
        view: The run, with all steps in the log of its watch.
        captures: Its captures, in order.
        attempts: All starts of the run, if there are several.
        follows: Whether the page fetches itself again and again.
    """
    steps = view.watch
    found = events(steps)
    content = _health(health(view, found, _cause_of(found, captures)), view)
    bars = logged_bars(steps, captures, found)
    shown = bars or [capture.bar for capture in captures if capture.report]
    if shown:
        content += figures_section(_figures(shown, steps))
        content += bars_section(
            "Every step" if bars else "Every captured step", merged(shown, _MOST_BARS)
        )
    if len(bars) > _MOST_BARS:
        content += bars_section(f"The last {LATEST} steps", bars[-LATEST:])
    content += _events(found, captures)
    content += _hangs(view, [event.step for event in found if event.kind == "hang"])
    content += captured_steps(captures)
    if view.note:
        content += section("Captures", f"<p>{_text(view.note)}</p>")
    if steps:
        content += _waits(steps[-1])
        notes = {DEVICES: hand_off_sentence(steps)}
        for title, rows in tables_of(steps[-_RECENT:]).items():
            content += section(title, _html(title, rows), notes.get(title, ""))
        content += latest_steps(steps[-LATEST:], bars[-LATEST:])
    content += _start_up(view.start_up)
    content += _attempts(view.run, attempts)
    count = f"{len(captures) or 'no'} captured step{'s' if len(captures) > 1 else ''}"
    name = visible(view.run.resolve().name)
    return document(name, count, content, follows=follows)


def _cause_of(found: Sequence[Event], captures: Sequence[RunCapture]) -> str:
    """Return the first finding of the capture of the last anomaly that may last and has one; empty
    without any.
    """
    for event in reversed(found):
        capture = capture_of(event, captures) if event.lasts is not False else None
        if capture is not None:
            return f"{capture.title}: {capture.first_finding}"
    return ""


def _html(title: str, rows: Table) -> str:
    """Return a table of the terminal as HTML."""
    columns = [[named(str(cell)) for cell in column.cells] for column in rows.columns]
    headings = [str(column.header) for column in rows.columns]
    return table(title, headings, [*zip(*columns, strict=True)])


def _health(state: Health, view: RunView) -> str:
    """Return the first section: the state, what changed, and what to do."""
    changed = list(state.changed[:_MOST_CHANGES])
    if len(state.changed) > _MOST_CHANGES:
        changed.append(f"and {len(state.changed) - _MOST_CHANGES} more, below")
    running = "" if view.is_over else "running: "
    rows = {"State": [running + view.state], "What changed": changed, "What to do": state.advice}
    shown = ""
    for title, sentences in rows.items():
        lines = "".join(f"<dd>{_text(line)}</dd>" for line in filter(None, sentences))
        if lines:
            shown += f"<div><dt>{title}</dt>{lines}</div>"
    return (
        f'<section id="health" class="{state.kind}" aria-label="Health">'
        f"<p><strong>{_text(state.verdict)}</strong></p><dl>{shown}</dl></section>"
    )


def _text(line: str) -> str:
    return escape(visible(line))


def _figures(bars: Sequence[Bar], steps: Sequence[StepSummary]) -> Iterator[Figure]:
    took = [bar.seconds for bar in bars]
    spread = f"of {len(took):,} steps, from {duration(min(took))} to {duration(max(took))}"
    yield Figure("Step, median", duration(median(took)), spread)
    index = slowest(took)
    over = took[index] - median(took)
    line = f"{duration(took[index])}, {duration(over, signed=True)} over the median"
    near = bars[max(0, index - _NEAR) : index + _NEAR]
    if len(bars) > 1 and (most := excess([bar.stages for bar in near], min(index, _NEAR))):
        line += f", most in {most[0]} ({duration(most[1], signed=True)})"
    if took[0] > took[index]:
        line += f"; the first took {duration(took[0])}"
    yield Figure("Slowest", bars[index].title, line)
    if steps:
        yield from _of_last(steps[-1])


def _of_last(last: StepSummary) -> Iterator[Figure]:
    """Yield figures of the last step: its duration, rates, waits and memory."""
    ended = local_time(last.end_ns).partition(" ")[2]
    yield Figure("Last step", duration(last.seconds), f"step {last.step}, ended at {ended}")
    if last.samples:
        rate = last.rates.get("tokens_per_s")
        line = f"{number(rate)} tokens per second" if rate else "in the last step"
        yield Figure("Samples per second", number(last.rates["samples_per_s"]), line)
    if last.trainer_idle is not None and last.rollout_idle is not None:
        line = f"of the step; the rollout waits {last.rollout_idle.share:.0%}"
        yield Figure("Trainer waits", f"{last.trainer_idle.share:.0%}", line)
    peaks = {row.lane: row.peak_bytes for row in last.memory if row.peak_bytes}
    if peaks:
        lane = max(peaks, key=peaks.__getitem__)
        yield Figure("Memory, highest peak", byte_size(peaks[lane]), lane)


def _events(found: Sequence[Event], captures: Sequence[RunCapture]) -> str:
    """Return a table of the notices and hangs, each with the capture or the reason for none."""
    rows = []
    for event in found[: -_MOST_EVENTS - 1 : -1]:
        is_hang = event.kind == "hang"
        why = f": {event.why_not}" if event.why_not else ""
        outcome = said("" if is_hang else f"not captured{why}")
        capture = capture_of(event, captures)
        if capture is not None:
            outcome = said(f"{capture.title}: {capture.first_finding}", capture.link)
        at = local_time(event.at_ns) if event.at_ns else ""
        cells = [named(f"Step {event.step}"), named(at), said(event.what), named(event.who)]
        rows.append([*cells, named(event.now), outcome])
    headings = ("step", "ended", "what", "process", "now", "capture")
    note = "By the watch, the latest first, whether it was captured or not."
    return section("Noticed", table("Noticed", headings, rows), note)


def _waits(step: StepSummary) -> str:
    lines = "".join(f"<li>{_text(line)}</li>" for line in waits(step))
    if not lines:
        return ""
    return section("Who waits for whom", f"<ul>{lines}</ul>", f"In step {step.step}.")


def _hangs(view: RunView, ended: Sequence[int]) -> str:
    """Return the stacks of the processes in the open hang, and in ended ones."""
    folder = view.run / HANGS
    content = ""
    if view.hangs:
        content = _stacks("Now", read_stacks(folder, view.hangs), " open")
    for step in ended[: -_MOST_HANGS - 1 : -1]:
        content += _stacks(f"Step {step}, ended", read_stacks(folder / ended_hang(step)))
    return section("Hangs", content, "The stacks of the processes, as they wrote them themselves.")


def _stacks(title: str, processes: Sequence[HangStacks], opened: str = "") -> str:
    content = ""
    for process in processes:
        frames = ""
        for name, lines in (process.threads | process.tasks).items():
            stack = "\n".join(map(_text, lines))
            frames += f"<p><bdi>{_text(name)}</bdi></p><pre>{stack}</pre>"
        summary = f"{title}: <bdi>{_text(process.lane)}</bdi> <bdi>{_text(process.code)}</bdi>"
        content += f"<details{opened}><summary>{summary}</summary>{frames}</details>"
        opened = ""
    return content


def _start_up(start_up: StartUp | None) -> str:
    """Return tables of the time before the first step: its path, and the parts of each process."""
    if start_up is None:
        return ""
    rows = [
        [named(part.name or "unknown"), named(part.lane), named(part.inside), timed(part.seconds)]
        for part in start_up.path
    ]
    shown = table("Start-up", ("part", "process", "waited", "seconds"), rows)
    rows = [[named(p.lane), named(p.name), timed(p.seconds)] for p in start_up.parts]
    shown += table("Start of each process", ("process", "part", "seconds"), rows)
    return section("Start-up", shown, f"{start_up.sentence()}.")


def _attempts(run: Path, attempts: Sequence[Attempt]) -> str:
    """Return a table of all starts of a run: when, which steps, and how each ended."""
    rows = []
    for attempt in attempts:
        name = attempt.folder.resolve().name
        link = ""
        if attempt.folder != run:
            link = quote(os.path.relpath(attempt.folder / RUN_PAGE, run))
        steps = "none" if attempt.steps is None else "{} to {}".format(*attempt.steps)
        begun = local_time(attempt.info.begin_ns)
        rows.append([named(name, link), named(begun), named(steps), said(attempt.end)])
    return section("Attempts", table("Attempts", ("start", "begun", "steps", "end"), rows))
