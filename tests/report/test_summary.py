"""The first screen: what is wrong with a step is said in all of its places alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drawn_steps import whole_step

from verl_profiling.report.html import summary


def seen(folder: Path, fault: str = "healthy") -> str:
    """Return the text of the first screen of a step."""
    page = summary(whole_step(folder, ranks=16, replicas=4, fault=fault))
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


@pytest.mark.parametrize(
    ("fault", "cause", "finding"),
    [
        ("slow rank", "% waiting for other ranks", "actor_rank10 is slow in update_actor"),
        ("long tail", "% long tail", "Where: rollout3_rank0."),
        ("slow weight sync", "% weight sync", "Lanes were idle while weights went to the engines"),
    ],
)
def test_lost_time_has_the_cause_of_the_first_finding(
    tmp_path: Path, fault: str, cause: str, finding: str
) -> None:
    """A large cause that every healthy step has does not hide the one at fault."""
    text = seen(tmp_path, fault)
    assert cause in text
    assert finding in text
    assert fault != "slow weight sync" or "Where:" not in text, "a list of every lane says no more"


def test_a_healthy_step_is_calm(tmp_path: Path) -> None:
    """Nothing is found, and the lost time has its largest cause."""
    text = seen(tmp_path)
    assert "Nothing stands out" in text
    assert "% waiting for rollout, nothing unusual" in text
    assert text.count("%") == 3, "of the observed time: busy, lost, and the largest cause"
