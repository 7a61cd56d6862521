"""No input makes a command crash, hang, be fooled or write a broken file;
``make test-fuzz`` tries 22,000.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from shutil import rmtree

import pytest

from tests.fuzz.cases import Case, random_case, run_case
from tests.fuzz.inputs import INPUTS, build

FOUND = Path(__file__).parent / "found"
FEW, MANY = 33, 22_000
SEED = int(os.environ.get("FUZZ_SEED", "0"))
KINDS = ("crash", "wrong ok", "bad output")


def stored() -> list[Case]:
    """Return the cases that once failed: ``found/<input>/<command>-<what it is>``."""
    return [
        Case(path.parent.name.replace("_", " "), path.name.partition("-")[0], path.read_bytes())
        for path in sorted(FOUND.glob("*/*"))
    ]


def failures(
    cases: Iterable[int | Case], scratch: Path, table: Counter[tuple[str, str, str]]
) -> list[str]:
    """Run cases, given as seeds or as they are; count verdicts by input and command;
    return the failures.
    """
    failed = []
    whole, folder = scratch / "whole", scratch / "case"
    build(whole)
    for given in cases:
        case = random_case(given, whole) if isinstance(given, int) else given
        verdict = run_case(case, whole, folder)
        rmtree(folder)
        table[case.input, case.command, verdict.kind] += 1
        if verdict.kind != "fine":
            which = f"seed {given}" if isinstance(given, int) else repr(case.data[:80])
            failed.append(
                f"{case.input}, {case.command}, {which}: {verdict.kind}: {verdict.detail}"
            )
    return failed


def printed(table: Counter[tuple[str, str, str]]) -> str:
    lines = [
        f"{'input':20} {'command':10} {'cases':>7} " + " ".join(f"{kind:>10}" for kind in KINDS)
    ]
    for name, command in (*sorted({key[:2] for key in table}), ("all", "")):
        own = [key for key in table if name == "all" or key[:2] == (name, command)]
        counts = [sum(table[key] for key in own if key[2] == kind) for kind in ("fine", *KINDS)]
        lines.append(
            f"{name:20} {command:10} {sum(counts):7,} " + " ".join(f"{n:10,}" for n in counts[1:])
        )
    return "\n".join(lines)


def test_a_few_random_inputs_and_those_that_once_failed(tmp_path: Path) -> None:
    table: Counter[tuple[str, str, str]] = Counter()
    assert failures([*stored(), *range(SEED, SEED + FEW)], tmp_path, table) == []
    assert {key[0] for key in table} == set(INPUTS)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_many_random_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same for thousands; prints how many there were of each."""
    table: Counter[tuple[str, str, str]] = Counter()
    failed = failures(range(SEED, SEED + MANY), tmp_path, table)
    with capsys.disabled():
        print(f"\n{printed(table)}")
    assert failed == []
