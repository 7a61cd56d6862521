"""The newest releases that were tested: ``python -m tests.compatibility SUITE RESULTS.xml``.

It enters what a suite found into docs/compatibility.json, of which docs/compatibility.md is made:
a row per package and version, with the test, the day, the number of tests that passed, and what
does not work. ``make test-newest`` and ``make test-releases`` call it, where no CI runs them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROWS = Path(__file__).parents[1] / "docs/compatibility.json"
SUITES = {
    "newest": ("torch", "transformers", "pandas", "omegaconf", "mlflow"),
    "sglang-newest": ("sglang",),
}
"""Packages whose newest release a suite runs with; the suite of wheels has them in its tests."""
NAMED = {"mlflow": "mlflow", "pandas": "frame"}
"""A word in the names of the tests of a package that few tests use."""
WHEELS = "releases"
LIMITS = {
    (
        "sglang-newest",
        "sglang",
        "0.5.23",
    ): "with a server's URL: a second start by another client is not noticed; "
    "servers with an API key are refused",
    (WHEELS, "vllm", "0.33.0"): "not run: no CPU build on the index",
    (WHEELS, "torch_npu", "2.14.0"): "not run: needs CANN",
}
_RELEASE = re.compile(r"test_\w*?(vllm|sglang|torch_npu)_?\w*\[([\d.]+(?:post\d+)?)\]")


class Row(NamedTuple):
    """A row of the table."""

    package: str
    version: str
    test: str
    day: str
    result: str
    limits: str


def outcomes(results: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the outcome of each test."""
    for case in ET.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        yield case.get("name", ""), "skipped" if "skipped" in kinds else outcome


def found(suite: str, results: Path) -> list[Row]:
    """Return the rows of a suite."""
    tests: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, outcome in outcomes(results):
        if suite == WHEELS:
            if match := _RELEASE.match(name):
                tests[match[1], match[2]].append((name, outcome))
            continue
        for package in SUITES[suite]:
            version = metadata.version(package).partition("+")[0]
            if NAMED.get(package, "") in name:
                tests[package, version].append((name, outcome))
    how = "its wheel, read" if suite == WHEELS else "run"
    test = f"`make test-{suite}`: {how}" if suite == WHEELS else f"`make test-newest`: {how}"
    rows = []
    for (package, version), cases in tests.items():
        passed = sum(outcome == "passed" for _, outcome in cases)
        failed = list(dict.fromkeys(f"`{name}`" for name, outcome in cases if outcome == "failed"))
        if passed or failed:
            limits = "; ".join(
                [*failed, *filter(None, [LIMITS.get((suite, package, version), "")])]
            )
            row = Row(package, version, test, time.strftime("%Y-%m-%d"), f"{passed}", limits)
            rows.append(row)
    return rows


def entered(old: list[list[str]], new: list[Row]) -> list[list[str]]:
    """Return the rows with new ones in place of those of the same package, version and test."""
    replaced = {row[:3] for row in new}
    rows = [Row(*row) for row in old if tuple(row[:3]) not in replaced]
    return [list(row) for row in sorted([*rows, *new], key=_order)]


def _order(row: Row) -> tuple[Any, ...]:
    numbers = [-int(number) for number in re.findall(r"\d+", row.version)]
    return row.package, numbers, row.test


def markdown(rows: list[list[str]]) -> str:
    """Return the table of docs/compatibility.md."""
    lines = [
        "| package | version | test | day | passed | does not work |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> int:
    """Enter the results of a suite; return 1 if a test failed."""
    suite, results = sys.argv[1], Path(sys.argv[2])
    rows = found(suite, results)
    for row in rows:
        print(*row, sep="  ")
    if rows and os.environ.get("CI") != "true":
        old = json.loads(ROWS.read_text()) if ROWS.exists() else []
        ROWS.write_text(json.dumps(entered(old, rows), indent=1) + "\n")
    return int(any(outcome == "failed" for _, outcome in outcomes(results)))


if __name__ == "__main__":
    sys.exit(main())
