"""Colours of the page: those of stages, of lost time and of load are all different."""

from __future__ import annotations

import re
from importlib import resources

from verl_profiling.report.lost import CAUSES
from verl_profiling.report.model import OTHER_RANKS
from verl_profiling.report.tables import stage_class

STYLE = (resources.files("verl_profiling.report") / "page" / "page.css").read_text(encoding="utf-8")


def test_stages_lost_time_and_load_share_no_colour() -> None:
    """A known stage has a colour of its own; all other names share six."""
    light = dict(re.findall(r"--([\w-]+): (#\w{6})", STYLE.partition("}")[0]))
    light |= dict(re.findall(r"\.(s\d+|k-\w+) \{ --key: (#\w{6})", STYLE))
    causes = [f"k-{cause}" for cause in (*CAUSES, OTHER_RANKS)]
    drawn = [light[name] for name in (*(f"s{i}" for i in range(16)), *causes, "compute", "communication")]
    assert len(set(drawn)) == len(drawn)
    known = [stage_class(name) for name in ("rollout", "reward", "update_actor", "validate")]
    assert known == ["s0", "s1", "s7", "s9"]
    assert {stage_class(f"mine {i}") for i in range(100)} == {f"s{i}" for i in range(10, 16)}
