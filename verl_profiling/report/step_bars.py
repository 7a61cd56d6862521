"""Draws the steps of a run as stacked bars; if there are too many, a bar is several steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from verl_profiling.report.colours import stage_class
from verl_profiling.report.html import section
from verl_profiling.report.phrases import axis_top
from verl_profiling.units import duration, visible

CAPTURED, NOTICED, HUNG = "▼", "●", "■"
"""Signs above a bar."""

_BEYOND = "▲"
_MEANINGS = {CAPTURED: "captured", NOTICED: "noticed", HUNG: "hung", _BEYOND: "beyond the axis"}
_MOST_LABELS = 12
_MOST_LINES = 3  # times in the title of a bar; a table has all
_FLEX = 1e6  # CSS leaves a part of a bar empty where the factors add up to less than 1
_THINNEST = 0.01  # thinnest part of a bar that is drawn, as a share of the axis: two pixels


class Bar(NamedTuple):
    """A step, or the mean of several.

    Attributes:
        title: Its name, e.g. ``Step 12``.
        seconds: Its duration (s).
        stages: Seconds by name.
        link: Address of its page; empty for none.
        marks: Signs above the bar, each with its text.
    """

    title: str
    seconds: float
    stages: Mapping[str, float]
    link: str = ""
    marks: Mapping[str, str] = MappingProxyType({})


def merged(bars: Sequence[Bar], most: int) -> Sequence[Bar]:
    """Return at most ``most`` bars: of a longer run, the means of successive steps."""
    width = -(-len(bars) // most)
    if width < 2:
        return bars
    return [_mean(bars[first : first + width]) for first in range(0, len(bars), width)]


def _mean(bars: Sequence[Bar]) -> Bar:
    stages = defaultdict[str, float](float)
    marks: dict[str, str] = {}
    link = ""
    for bar in bars:
        for name, seconds in bar.stages.items():
            stages[name] += seconds / len(bars)
        marks |= bar.marks
        link = bar.link or link
    last = bars[-1].title.removeprefix("Step ")
    seconds = sum(bar.seconds for bar in bars) / len(bars)
    return Bar(f"{bars[0].title} to {last}, mean", seconds, stages, link, marks)


def bars_section(
    title: str,
    bars: Sequence[Bar],
    note: str = "",
    key: Callable[[str], str] = stage_class,
    shown: Callable[[str], str] = str,
) -> str:
    """Return a section with a stacked bar of stages for each step.

    The title of a bar has the longest stages, and captured steps are links.

    Args:
        title: Title of the section.
        bars: The steps.
        note: Sentence below the title.
        key: Function that returns the colour class of a stage.
        shown: Function that returns the shown name of a stage.
    """
    names = list(dict.fromkeys(chain.from_iterable(bar.stages for bar in bars)))
    totals = [sum(bar.stages.values()) for bar in bars]
    top = axis_top(totals) or 1.0
    every = -(-len(bars) // _MOST_LABELS)
    drawn = ""
    signs = set[str]()
    for index, (bar, total) in enumerate(zip(bars, totals, strict=True)):
        marks = dict(bar.marks)
        if total > 1.001 * top:  # sums of floats differ in their last digits
            marks[_BEYOND] = ""
        signs.update(marks)
        content = f"<u>{''.join(marks)}</u>" if marks else ""
        for name in names:
            if bar.stages.get(name, 0.0) > _THINNEST * top:
                flex = f"flex:{_FLEX * bar.stages[name]:.3g}"
                content += f'<i class="{escape(key(name))}" style="{flex}"></i>'
        if not index % every:
            label = bar.title.removeprefix("Step ").partition(" ")[0]
            content += f"<b>{escape(visible(label))}</b>"
        tag, link = ("a", f' href="{escape(bar.link)}"') if bar.link else ("div", "")
        drawn += (
            f'<{tag} class="step"{link} title="{escape(_title(bar, total, shown))}" '
            f'style="height:{min(total / top, 1):.2%}">{content}</{tag}>'
        )
    legend = ""
    for name in names:
        text = escape(visible(shown(name)))
        legend += f'<li><i class="{escape(key(name))}"></i><bdi>{text}</bdi></li>'
    for sign, meaning in _MEANINGS.items():
        if sign in signs:
            legend += f"<li>{sign} {meaning}</li>"
    axis = f'<span>{duration(top)}</span><span style="bottom:50%">{duration(top / 2)}</span>'
    chart = f'<ul class="legend">{legend}</ul><div class="trend">{axis}{drawn}</div>'
    return section(title, chart, note)


def _title(bar: Bar, total: float, shown: Callable[[str], str]) -> str:
    """Return the time of a step, its marks, and its longest stages."""
    parts = [f"{bar.title[:1].lower()}{bar.title[1:]}: {duration(total)}"]
    parts += filter(None, bar.marks.values())
    longest = sorted(bar.stages.items(), key=lambda stage: -stage[1])[:_MOST_LINES]
    parts += [f"{shown(name)} {duration(took)}" for name, took in longest if took > 0]
    return visible(", ".join(parts))
