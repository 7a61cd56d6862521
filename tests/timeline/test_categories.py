"""The table of categories: complete for the torch that is installed, and without contradictions."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from verl_profiling.timeline.categories import CATEGORIES, meaning_of


def test_each_category_has_one_meaning() -> None:
    """A name that is listed twice would take the meaning of the last row."""
    counts = Counter(name for row in CATEGORIES for name in row.names)
    assert [name for name, times in counts.items() if times > 1] == []


def test_every_category_of_the_installed_torch_is_known() -> None:
    """A category that a new torch brings has to be looked at: is it work, or a mark?"""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed; `make env` builds an environment")
    header = Path(found.origin).parent / "include" / "kineto" / "ActivityType.h"
    names = set(re.findall(r'\{"(\w+)", ActivityType::', header.read_text())) - {"ENUM_COUNT"}
    assert len(names) > 20
    assert {name for name in names if meaning_of(name) is None} == set()
