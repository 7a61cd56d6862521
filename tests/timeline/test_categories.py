"""The table of categories: complete for the torch that is installed, and without contradictions."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from verl_profiling.timeline.categories import CATEGORIES, is_host, is_on_device, meaning_of
from verl_profiling.timeline.trace import Event


def test_each_category_has_one_meaning() -> None:
    """No name is in two rows, and every row has a source."""
    counts = Counter(name for row in CATEGORIES for name in row.names)
    assert counts.total() == len(counts)
    assert all(row.source.startswith("https://") for row in CATEGORIES)


def test_every_category_of_the_installed_torch_is_known() -> None:
    """A category that a new torch brings has to be looked at: is it work, or a mark?"""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed; `make env` builds an environment")
    header = Path(found.origin).parent / "include" / "kineto" / "ActivityType.h"
    names = set(re.findall(r'\{"(\w+)", ActivityType::', header.read_text())) - {"ENUM_COUNT"}
    assert len(names) > 20
    assert {name for name in names if meaning_of(name) is None} == set()


@pytest.mark.parametrize(
    ("category", "phase", "on_device", "on_host"),
    [
        ("kernel", "X", True, False),
        ("mlu_memcpy", "X", True, False),
        ("gpu_user_annotation", "X", True, False),
        ("user_annotation", "X", False, True),
        ("ac2g", "f", True, False),
        ("ac2g", "s", False, False),
        ("Trace", "X", False, False),
        ("odd", "X", False, False),
        ("", "X", False, False),
    ],
)
def test_where_an_event_is_follows_from_its_category(
    category: str, phase: str, on_device: bool, on_host: bool
) -> None:
    """On a lane of a device, of a process on the host, or unknown."""
    event = Event(phase, cat=category)
    assert (is_on_device(event), is_host(event)) == (on_device, on_host)
