"""Plain traces of one folder are grouped by what belongs together: the step, and the time."""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError
from verl_profiling.report.build import build_report
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.lanes import Source
from verl_profiling.timeline.recordings import PlainTrace, recordings

DATA = Path(__file__).parents[1] / "data"
BASE_S = 1_700_000_000


def write_trace(path: Path, begin_s: float, length_s: float = 1.0, pid: int = 1) -> Path:
    """Write a trace of two kernels, the first at its begin and the second until its end."""
    kernels = [
        {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": 1.0}
        for ts in (begin_s * 1e6, (begin_s + length_s) * 1e6 - 1)
    ]
    process = {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "python"}}
    content = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": BASE_S * 10**9,
        "traceEvents": [process, *kernels],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def grouped(folder: Path) -> list[list[str]]:
    """Return the names of the traces of each step or recording."""
    return [
        sorted(source.path.relative_to(folder).as_posix() for source in step.sources)
        for step in find_steps(folder)
    ]


def test_traces_of_other_years_are_reported_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real ranks of 2023 and a trace of 2024: two recordings by their dates, and no step of a year."""
    for name in ("sampled_rank-0.json.gz", "sampled_rank-1.json.gz", "nccl_data.json.gz"):
        shutil.copy(DATA / name, tmp_path)
    assert grouped(tmp_path) == [
        ["sampled_rank-0.json.gz", "sampled_rank-1.json.gz"],
        ["nccl_data.json.gz"],
    ]
    assert main(["report", str(tmp_path)]) == 0
    titles = re.findall(r"^recording of (\S+) \S+ UTC: (\S+ m?s)$", capsys.readouterr().out, re.MULTILINE)
    assert [day for day, _ in titles] == ["2023-04-28", "2024-05-23"]
    assert all(build_report(step).span_us < 10e6 for step in find_steps(tmp_path))
    assert main(["merge", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("timeline.202*Z.json.gz"))) == 2


def test_one_that_is_asked_for_can_be_named(tmp_path: Path) -> None:
    """What wants a single step names the traces to give."""
    first, second = (write_trace(tmp_path / f"{name}.json", s) for name, s in (("a", 0), ("b", 9999)))
    with pytest.raises(ConfigError, match=rf"holds 2 steps; name one, e\.g\. {re.escape(str(second))}$"):
        open_step(tmp_path)
    assert open_step(first).directory == tmp_path


def test_files_that_follow_each_other_are_recordings(tmp_path: Path) -> None:
    """The profiler's schedule writes a file per cycle and rank; each cycle is one recording of all ranks."""
    for cycle in range(3):
        for rank in range(2):
            name = f"rank{rank}.{1790857 + cycle * 5}.pt.trace.json"
            write_trace(tmp_path / name, cycle * 5 + rank * 0.01, pid=rank + 10)
    assert grouped(tmp_path) == [
        [f"rank{rank}.{1790857 + cycle * 5}.pt.trace.json" for rank in range(2)] for cycle in range(3)
    ]
    assert [step.label for step in find_steps(tmp_path)] == [
        "20231114T221320.000Z",
        "20231114T221325.000Z",
        "20231114T221330.000Z",
    ]


def test_parts_of_one_recording_stay_together(tmp_path: Path) -> None:
    """Prefill and decode of one process, one after the other, are no series: their names differ in words."""
    write_trace(tmp_path / "179-TP-0-EXTEND.trace.json", 0)
    write_trace(tmp_path / "179-TP-0-DECODE.trace.json", 2)
    assert len(grouped(tmp_path)) == 1


def test_traces_that_overlap_belong_together(tmp_path: Path) -> None:
    """However far apart they begin: ten minutes, of which the second recorded the last."""
    write_trace(tmp_path / "a.json", 0, 600, pid=1)
    write_trace(tmp_path / "b.json", 540, 60, pid=2)
    assert grouped(tmp_path) == [["a.json", "b.json"]]


def test_traces_are_read_twice_only_where_there_is_a_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that were recorded one after the other, none a minute after the one before, are no doubt."""
    for rank in range(8):
        write_trace(tmp_path / f"rank{rank}.json", rank * 30, 10, pid=rank)
    read: list[str] = []
    monkeypatch.setattr("verl_profiling.timeline.recordings._span", lambda trace: read.append(trace.name))
    assert len(grouped(tmp_path)) == 1
    assert read == []


@pytest.mark.parametrize(("gap_s", "groups"), [(59, 1), (61, 2)])
def test_a_minute_without_a_recording_parts_traces(tmp_path: Path, gap_s: int, groups: int) -> None:
    """Where no name says that they are of one step."""
    write_trace(tmp_path / "a.json", 0)
    write_trace(tmp_path / "b.json", 1 + gap_s)
    assert len(grouped(tmp_path)) == groups


@pytest.mark.parametrize(("gap_s", "groups"), [(3500, 1), (3700, 2)])
def test_a_step_may_leave_out_up_to_an_hour(tmp_path: Path, gap_s: int, groups: int) -> None:
    """A discrete capture does not record the rollout between two stages."""
    write_trace(tmp_path / "actor" / "step3_rank0.json", 1 + gap_s)
    write_trace(tmp_path / "ref" / "step3_rank0.json", 0)
    assert len(grouped(tmp_path)) == groups
    assert all(step.title.startswith("step 3") for step in find_steps(tmp_path))


def test_the_same_step_of_two_runs_is_not_mixed(tmp_path: Path) -> None:
    """Another process wrote the same name at another time; a stage that ran again is the same process."""
    write_trace(tmp_path / "run1" / "step1" / "rank0.json", 0, pid=10)
    write_trace(tmp_path / "run2" / "step1" / "rank0.json", 300, pid=20)
    assert grouped(tmp_path) == [["run1/step1/rank0.json"], ["run2/step1/rank0.json"]]
    same = tmp_path / "same"
    write_trace(same / "step1_rank0.1.json", 0)
    write_trace(same / "step1_rank0.2.json", 300)
    assert len(grouped(same)) == 1


def test_recordings_of_the_same_instant_have_files_of_their_own(tmp_path: Path) -> None:
    """Traces shorter than a millisecond, one after the other."""
    for number in range(3):
        write_trace(tmp_path / f"rank0.{number}.json", number * 3e-4, 1e-4)
    names = [step.output("report.json").name for step in find_steps(tmp_path)]
    assert names == [f"report.20231114T221320.000Z{number}.json" for number in ("", ".2", ".3")]


def test_a_trace_without_a_time_goes_with_the_first(tmp_path: Path) -> None:
    """It is not lost."""
    (tmp_path / "z.json").write_text('{"schemaVersion": 1, "traceEvents": []}')
    write_trace(tmp_path / "a.json", 0)
    write_trace(tmp_path / "b.json", 9999)
    assert grouped(tmp_path) == [["a.json", "z.json"], ["b.json"]]


@given(begins=st.lists(st.integers(0, 10**6), min_size=1, max_size=30), of_a_step=st.booleans())
def test_every_trace_is_in_one_recording(begins: list[int], of_a_step: bool) -> None:
    """Whatever their times; recordings are in order, and those that are close stay together."""
    traces = [
        PlainTrace(
            Source(path=DATA / "none", lane=f"l{i}", worker="", role=""), ("", "", i), f"{i}", s * 10**9
        )
        for i, s in enumerate(begins)
    ]
    spans = {trace.name: (trace.begin_ns, trace.begin_ns + 10**9) for trace in traces}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_profiling.timeline.recordings._span", lambda trace: spans[trace.name])
        found = recordings(traces, of_a_step=of_a_step)
    assert sorted(t.name for r in found for t in r.traces) == sorted(t.name for t in traces)
    apart_ns = (3600 if of_a_step else 60) * 10**9
    for before, after in pairwise(found):
        assert after.begin_ns - max(spans[t.name][1] for t in before.traces) > apart_ns
