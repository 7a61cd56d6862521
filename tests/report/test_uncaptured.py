"""The report of a run of which no step was captured: what its watch has logged,
and how to have a capture.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drawn_summaries import MS, STAGES, summary
from html_elements import Elements
from step_folders import build_step

from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_FINDING, EXIT_OK, main
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.files.watch_log import WATCH_LOG
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RunInfo
from verl_profiling.watch.log_writer import WatchLog


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 20 steps with its watch on, none of which was captured."""
    folder = tmp_path / "a run"
    folder.mkdir()
    log = WatchLog(folder)
    for number in range(20):
        log(summary(number, spans=[SpanTotal("tool:search", 240, 12_300_000_000)]))
    return folder


def write_start(run: Path, process: ProcessId, end_ns: int | None = None) -> None:
    info = RunInfo(run_id="abc", begin_ns=1, process=process, config={}, versions={}, end_ns=end_ns)
    write_json_atomically(run / "run.json", info)


def test_the_terminal_shows_the_history_and_says_how_to_capture(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of an error: a job with its watch on is worth a look;
    check has nothing to complain of.
    """
    assert main(["report", str(run)]) == EXIT_OK
    said = capsys.readouterr().out
    for text in (
        "a run: has no run.json; last step logged ",
        "no capture so far",
        "step 19: 9.50 s, median 9.50 s of 20 steps",
        "actor_rank2 +500 ms",
        "tool:search",
        f"`verl-profiling trigger '{run}'` requests a capture from a running job.",
    ):
        assert text in said
    assert not (run / "index.html").exists()
    assert main(["check", str(run)]) == EXIT_OK
    said = capsys.readouterr().out
    assert said.startswith("No step was captured. schedule.steps lists steps beforehand")
    assert said.endswith("0 artifacts, all ok\n")
    build_step(run.parent / "captured", step=1)
    for command in (["merge", str(run)], ["diff", str(run), str(run.parent / "captured")]):
        assert main(command) == EXIT_BAD_INPUT
        assert "No step was captured. schedule.steps lists steps" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(20))
def test_watched_runs_are_compared_without_captures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """A stage that became slower is in the table, with its noise, and fails the limit;
    another does not.
    """
    noise = random.Random(seed)
    slow, ratio = noise.choice(["rollout", "old_log_prob", "update_actor"]), noise.uniform(1.3, 3.0)
    for side, by in (("before", 1.0), ("after", ratio)):
        (tmp_path / side).mkdir()
        log = WatchLog(tmp_path / side)
        for step in range(noise.randint(10, 40)):
            times = {name: ms * noise.lognormvariate(0, 0.02) for name, ms in STAGES.items()}
            log(summary(step, {**times, slow: times[slow] * by}))
    sides = [str(tmp_path / "before"), str(tmp_path / "after")]
    assert main(["diff", *sides, "--fail-above", "20%"]) == EXIT_FINDING
    said = capsys.readouterr().out
    assert "medians of the watch's " in said
    assert f"{slow} (" in said.splitlines()[-1]
    assert not any(f"{name} (" in said.splitlines()[-1] for name in {*STAGES} - {slow})
    assert main(["diff", *sides[::-1], "--fail-above", "20%"]) == EXIT_OK
    assert "nothing" in capsys.readouterr().out


def run_table(said: str) -> dict[str, list[str]]:
    """Return the cells of the table on a run, by the first word of each row."""
    rows = said.partition("steps of the watch")[2].partition("from, to:")[0].splitlines()[3:]
    return {row.split()[0]: re.split(r"  +", row.strip())[1:] for row in rows if row.strip()}


def test_a_drift_is_more_than_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout that grows by a tenth; scoring that jitters by as much and an update
    by a little do not.
    """
    log = WatchLog(tmp_path)
    for number in range(40):
        jitter = (number * 17 % 40) / 40
        rollout = 5000 + 500 * number / 40 + 100 * jitter
        times = {
            "rollout": rollout,
            "reward": 1000 + 500 * jitter,
            "update_actor": 3000 + 20 * number / 40,
        }
        log(summary(number, times))
    assert main(["report", str(tmp_path)]) == EXIT_OK
    rows = run_table(capsys.readouterr().out)
    assert list(rows) == ["step", "rollout", "update_actor", "reward", "(in"]
    assert rows["rollout"][:3] == ["5.29 s", "5.11 s", "5.48 s"]
    assert rows["rollout"][3].startswith("drift +")
    assert 400 < float(rows["rollout"][3].split()[1]) < 600
    assert rows["reward"][3].startswith(("▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"))
    assert rows["update_actor"][3][:1] not in "dj"


@pytest.mark.parametrize("seed", range(20))
def test_a_jump_is_no_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    """Its size is that of the jump, wherever it is in the run."""
    noise = random.Random(seed)
    steps, jump = noise.randint(30, 90), noise.randint(500, 4000)
    at = noise.randint(steps // 4, 3 * steps // 4)
    log = WatchLog(tmp_path)
    for step in range(steps):
        log(
            summary(step, {"rollout": (5000 + jump * (step >= at)) * noise.lognormvariate(0, 0.01)})
        )
    assert main(["report", str(tmp_path)]) == EXIT_OK
    kind, size, unit = run_table(capsys.readouterr().out)["rollout"][3].split()
    assert kind == "jump"
    assert float(size) * {"s": 1000, "ms": 1}[unit] == pytest.approx(jump, abs=100)


def test_a_stage_of_some_steps_is_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validation every fifth step, which the last step does not have."""
    log = WatchLog(tmp_path)
    for number in range(12):
        log(summary(number, {"rollout": 5000} | ({} if number % 5 else {"validate": 2000})))
    assert main(["report", str(tmp_path)]) == EXIT_OK
    assert run_table(capsys.readouterr().out)["validate"][2] == "2.00 s"


def test_the_page_of_the_run_has_every_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a picture and as tables; JSON is one document with the sentence that the terminal says."""
    assert main(["report", str(run), "--save"]) == EXIT_OK
    assert f"wrote {run / 'index.html'}" in capsys.readouterr().err
    page = (run / "index.html").read_text()
    assert "no captured step" in page
    assert "No step was captured." in page
    assert 'id="every-step"' in page
    assert Elements(page).outside == []
    assert main(["report", str(run), "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == str(run)
    assert found["note"].startswith("No step was captured")
    assert [step["step"] for step in found["watch"]] == list(range(20))
    assert found["watch"][3]["exposed"][0]["exposed_ns"] == 5_000_000_000


def test_a_job_that_runs_is_asked_for_its_next_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has ended, or whose process is gone, cannot be asked any more; that is said."""
    write_start(run, ProcessId.current())
    assert main(["report", str(run)]) == EXIT_OK
    assert "requests a capture of the next step" in capsys.readouterr().out
    write_start(run, ProcessId.current(), end_ns=2)
    assert main(["report", str(run)]) == EXIT_OK
    assert "No step was captured, and the job has ended." in capsys.readouterr().out
    gone = subprocess.Popen(["true"])
    gone.wait()
    write_start(run, msgspec.structs.replace(ProcessId.current(), pid=gone.pid))
    assert main(["report", str(run)]) == EXIT_OK
    assert "and the job has ended" in capsys.readouterr().out
    (run / "run.json").write_text("{")
    assert main(["report", str(run)]) == EXIT_OK


def test_what_is_made_of_captured_steps_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--csv", "--tensorboard"):
        assert main(["report", str(run), option, str(run.parent / "out")]) == EXIT_BAD_INPUT
        assert f"{option}: No step was captured" in capsys.readouterr().err
        assert not (run.parent / "out").exists()


def test_beside_a_run_with_captures_both_are_shown(run: Path, tmp_path: Path) -> None:
    build_step(tmp_path / "other", step=3)
    assert main(["report", str(tmp_path / "other"), str(run), "--save"]) == EXIT_OK
    assert (tmp_path / "other" / "index.html").is_file()
    assert (run / "index.html").is_file()


SECONDS, PAGE = 30, 1_500_000
"""More than ten times what the readers were seen to take, and the most that a page may be."""

STRANGE: list[dict[str, Any]] = [
    {"end_ns": -(10**18)},
    {"begin_ns": -4 * 10**18, "end_ns": 4 * 10**18},
    {"end_ns": 1, "begin_ns": 0},
    {
        "weather": {"is": ["fine"]},
        "exposed": [{"name": "rollout", "exposed_ns": 5, "colour": "red"}],
    },
    {
        "exposed": [
            {"name": "a", "exposed_ns": 4 * 10**18, "imbalance": 1e308, "lead_ns": 4 * 10**18}
        ]
        * 3
    },
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
    assert not re.search(
        r"\b(nan|inf)\b", re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    )
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
    made = json.loads(
        msgspec.json.encode(msgspec.structs.replace(summary(step), loop=[], workers=[]))
    )
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
            summary(
                number,
                {f"étape {at} 世界 🚀 \u202e": 1.0 + 1000 * (at % 100 == 7) for at in range(500)},
            )
        )
    assert len(found_in(tmp_path, capsys)) == 100
    assert main(["top", "--once", str(tmp_path)]) == EXIT_OK
    shown = [
        row.split()[1] for row in capsys.readouterr().out.splitlines() if row.startswith("étape")
    ]
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
