"""Colours of the page: the same for a name everywhere, and readable in both themes."""

from __future__ import annotations

import re
from importlib import resources

from verl_profiling.report.lost import CAUSES
from verl_profiling.report.model import OTHER_RANKS
from verl_profiling.report.tables import stage_class

STYLE = (resources.files("verl_profiling.report") / "page" / "page.css").read_text(encoding="utf-8")
LIGHT, DARK = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in STYLE.split("}", 2)[:2])
LIGHT |= dict(re.findall(r"\.(s\d+|k-\w+) \{ --key: (#\w{6})", STYLE))
STAGES = [name for name in LIGHT if re.fullmatch(r"s\d+", name)]
LOST = [name for name in LIGHT if name.startswith("k-")]


def luminance(colour: str) -> float:
    """Return the relative luminance, as WCAG 2.2 defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_a_theme_changes_paper_and_ink_alone() -> None:
    """A stage, a cause and a load have one colour."""
    assert set(DARK) == {"paper", "ink", "faint", "line", "panel", "strong"}
    assert len(STAGES) == 16
    assert {f"k-{cause}" for cause in (*CAUSES, OTHER_RANKS)} == set(LOST)
    for name in (*STAGES, *LOST, "compute", "communication"):
        assert min(contrast(LIGHT[name], theme["paper"]) for theme in (LIGHT, DARK)) >= 3, name
    assert min(contrast(LIGHT[name], "#ffffff") for name in STAGES) >= 4.5


def test_no_colour_means_two_things() -> None:
    """Stages, causes and load share none; known stages have colours of their own."""
    drawn = [LIGHT[name] for name in (*STAGES, *LOST, "compute", "communication")]
    assert len(set(drawn)) == len(drawn)
    known = [stage_class(name) for name in ("rollout", "reward", "update_actor", "validate")]
    assert known == ["s0", "s1", "s7", "s9"]
    assert {stage_class(f"mine {i}") for i in range(100)} == {f"s{i}" for i in range(10, 16)}
    assert stage_class("mine 1") == stage_class("mine 1")
