"""Logs of the watch as they are found: torn, mixed, endless, of other versions; readers take all of them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_summaries import MS, summary
from html_elements import Elements

from verl_profiling.cli import main
from verl_profiling.commands import EXIT_OK
from verl_profiling.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.watch.log import WatchLog
from verl_profiling.watch_log import WATCH_LOG

SECONDS, PAGE = 30, 1_500_000
"""More than ten times what the readers were seen to take, and the most that a page may be."""

STRANGE: list[dict[str, Any]] = [
    {"end_ns": -(10**18)},
    {"begin_ns": -4 * 10**18, "end_ns": 4 * 10**18},
    {"end_ns": 1, "begin_ns": 0},
    {"weather": {"is": ["fine"]}, "exposed": [{"name": "rollout", "exposed_ns": 5, "colour": "red"}]},
    {"exposed": [{"name": "a", "exposed_ns": 4 * 10**18, "imbalance": 1e308, "lead_ns": 4 * 10**18}] * 3},
    {"exposed": [{"name": "a", "exposed_ns": 1, "imbalance": -5.0}]},
    {"exposed": []},
    {"spans": [{"name": "x", "runs": 1 << 53, "duration_ns": 4 * 10**18, "failed": 1 << 53}] * 3},
    {"spans": [{"name": "x", "runs": 0, "duration_ns": 5}]},
    {"memory": [{"role": "r", "peak_bytes": 1 << 53, "held_bytes": 0}] * 2},
    {"captured": "../../etc/passwd"},
    {"policy_version": -1},
]


def found_in(run: Path, capsys: pytest.CaptureFixture[str]) -> list[StepSummary]:
    """Let all readers look at a run, within bounds; return the steps that it has for them."""
    begin_s = time.thread_time()
    for command in (["top", "--once"], ["report", "--save"]):
        assert main([*command, str(run)]) == EXIT_OK
    assert time.thread_time() - begin_s < SECONDS
    said = capsys.readouterr().out
    assert "\x1b" not in said
    page = (run / "index.html").read_text()
    assert len(page.encode()) < PAGE
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL))
    assert Elements(page).outside == []
    assert main(["report", "--json", str(run)]) == EXIT_OK
    steps = json.loads(capsys.readouterr().out)["watch"]
    return [msgspec.convert(step, StepSummary) for step in steps]


def write_lines(run: Path, *lines: str | bytes) -> None:
    run.mkdir(exist_ok=True)
    encoded = [line.encode() if isinstance(line, str) else line for line in lines]
    (run / WATCH_LOG).write_bytes(b"\n".join(encoded))


def line(step: int, **fields: Any) -> str:
    """Return a line of a step, with some fields as they should not be."""
    made = json.loads(msgspec.json.encode(msgspec.structs.replace(summary(step), loop=[], workers=[])))
    return json.dumps({**made, **fields})


def test_strange_numbers_and_later_versions_are_shown_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Negative, huge, nothing, unknown: also where it is the last step."""
    strange = [line(step, **fields) for step, fields in enumerate(STRANGE, 2)]
    write_lines(tmp_path, line(1), *strange, "")
    assert [step.step for step in found_in(tmp_path, capsys)] == list(range(1, len(STRANGE) + 2))


@pytest.mark.parametrize("step", [1 << 53, -(1 << 53)])
def test_a_step_with_a_huge_number_hides_no_other(
    tmp_path: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is logged after it counts, as after a run was resumed from a step before."""
    lost = json.loads(line(2))
    huge = json.dumps({**lost, "step": step})
    write_lines(tmp_path, line(1), huge, line(3), line(4), "")
    assert {3, 4} <= {found.step for found in found_in(tmp_path, capsys)}


def test_stages_with_any_name_and_hundreds_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest are shown, in their order, and the rest is counted or summed up."""
    log = WatchLog(tmp_path)
    for number in range(100):
        log(
            summary(number, {f"étape {at} 世界 🚀 \u202e": 1.0 + 1000 * (at % 100 == 7) for at in range(500)})
        )
    assert len(found_in(tmp_path, capsys)) == 100
    assert main(["top", "--once", str(tmp_path)]) == EXIT_OK
    shown = [row.split()[1] for row in capsys.readouterr().out.splitlines() if row.startswith("étape")]
    assert [at for at in shown if int(at) % 100 == 7] == ["7", "107", "207", "307", "407"]
    assert len(shown) <= 16


def test_a_thousand_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their number is in no line: a line has roles, and of names of spans so many."""
    ranks = [
        RankUse(
            lane=f"actor_rank{rank}",
            role="actor",
            rank=rank,
            peak_bytes=rank * 10**8,
            spans=[SpanTotal(f"tool:{rank}.{at}", 10, MS) for at in range(20)],
        )
        for rank in range(1_024)
    ]
    log = WatchLog(tmp_path)
    for number in range(5):
        step = msgspec.structs.replace(summary(number), workers=ranks)
        step.add_up()
        log(step)
    assert (tmp_path / WATCH_LOG).stat().st_size < 5 * 10_000
    steps = found_in(tmp_path, capsys)
    assert sum(spans.runs for spans in steps[-1].spans) == 1_024 * 20 * 10
    assert steps[-1].memory[1].lane == "actor_rank1023"
