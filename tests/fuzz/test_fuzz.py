"""No input makes a command crash, hang, be fooled or write a broken file; ``make test-fuzz`` tries 22,000.

A case that once failed is a file in ``found``, named after its input and its command.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fuzz.cases import Case, Verdict, random_case
from tests.fuzz.inputs import INPUTS, build
from tests.fuzz.pool import run_all

FOUND = Path(__file__).parent / "found"
FEW, MANY = 96, 22_000
SEED = int(os.environ.get("FUZZ_SEED", "0"))
KINDS = ("crash", "hang", "wrong ok", "bad output")


def stored() -> list[Case]:
    """Return the cases that once failed: ``found/<input>/<command>-<what it is>``."""
    return [
        Case(path.parent.name.replace("_", " "), path.name.partition("-")[0], path.read_bytes())
        for path in sorted(FOUND.glob("*/*"))
    ]


def failures(found: Iterable[tuple[int | Case, Verdict]], table: Counter[tuple[str, str, str]]) -> list[str]:
    """Count verdicts by input and command; return a sentence on each failure."""
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        build(whole)
        for given, verdict in found:
            case = random_case(given, whole) if isinstance(given, int) else given
            table[case.input, case.command, verdict.kind] += 1
            if verdict.kind != "fine":
                which = f"seed {given}" if isinstance(given, int) else repr(case.data[:80])
                failed.append(f"{case.input}, {case.command}, {which}: {verdict.kind}: {verdict.detail}")
    return failed


def printed(table: Counter[tuple[str, str, str]]) -> str:
    """Return the table by input and command."""
    lines = [f"{'input':20} {'command':10} {'cases':>7} " + " ".join(f"{kind:>10}" for kind in KINDS)]
    for name, command in (*sorted({key[:2] for key in table}), ("all", "")):
        own = [key for key in table if name == "all" or key[:2] == (name, command)]
        counts = [sum(table[key] for key in own if key[2] == kind) for kind in ("fine", *KINDS)]
        lines.append(f"{name:20} {command:10} {sum(counts):7,} " + " ".join(f"{n:10,}" for n in counts[1:]))
    return "\n".join(lines)


def test_a_few_random_inputs_and_those_that_once_failed() -> None:
    """Each input and each stored case, in processes with bounded time and memory."""
    table: Counter[tuple[str, str, str]] = Counter()
    assert failures(run_all([*stored(), *range(SEED, SEED + FEW)], processes=2), table) == []
    assert {key[0] for key in table} == set(INPUTS)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_many_random_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    """The same for thousands; prints how many there were of each."""
    table: Counter[tuple[str, str, str]] = Counter()
    failed = failures(run_all(range(SEED, SEED + MANY), processes=os.cpu_count() or 2), table)
    with capsys.disabled():
        print(f"\n{printed(table)}")
    assert failed == []


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"while True: pass", "hang"), (b"bytes(3 << 30)", "crash"), (b"os.abort()", "crash"), (b"", "fine")],
)
def test_a_hang_a_death_and_a_flood_are_seen(data: bytes, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool that runs the cases notices what it is to notice, and goes on with the next case."""
    monkeypatch.setattr("tests.fuzz.pool.CPU_S", 0.5)
    cases = [Case("python", "exec", data), Case("python", "exec", b"")]
    verdicts = [verdict.kind for _, verdict in run_all(cases, processes=1)]
    assert verdicts == [kind, "fine"]
