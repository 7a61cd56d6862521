"""The JSON is documented: every field, cause and threshold."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from verl_profiling.report import columns, model
from verl_profiling.report.findings import FINDINGS
from verl_profiling.report.lost import CAUSES

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
STRUCTS = [
    found
    for module in (model, columns)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, msgspec.Struct) and found.__module__ == module.__name__
]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_documented(struct: type[msgspec.Struct]) -> None:
    """The page of the schema is made of these docstrings; times carry their unit in the name."""
    documented = " ".join(each.__doc__ for each in struct.__mro__ if issubclass(each, msgspec.Struct))
    for field in msgspec.structs.fields(struct):
        assert re.search(rf"\b{field.name}\b", documented), field.name


def test_every_cause_and_threshold_is_stated() -> None:
    """In the documentation."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Lost time")[2], re.MULTILINE)
    assert tuple(rows[: len(CAUSES)]) == CAUSES
    findings = PAGE.partition("## Findings")[2]
    for rule, share in FINDINGS.items():
        (row,) = re.findall(rf"^\| `{rule}` \| (.*) \|$", findings, re.MULTILINE)
        assert f"{share:.0%}" in row
