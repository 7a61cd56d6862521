"""The Python way into a capture: steps, reports, lanes, frames, timelines,
in a notebook and on bad input.
"""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from html_elements import Elements
from step_folders import STEP, WORKERS, build_step, rewrite, rewrite_worker, with_facts

from verl_profiling.analysis import CapturedStep, FrameName, load_reports, open_run, open_step
from verl_profiling.errors import ConfigError, ToolUnavailableError, TraceFormatError
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Request
from verl_profiling.report.model import REPORT_SCHEMA_VERSION
from verl_profiling.report.tables import TABLES
from verl_profiling.slices.intervals import length

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_step(tmp_path_factory.mktemp("run"))


def test_a_step_has_a_report_lanes_and_its_manifest(folder: Path) -> None:
    """The report is computed once, and a lane's sets of time are those behind its numbers."""
    step = open_step(folder)
    assert (step.step, step.directory) == (STEP, folder)
    assert step.manifest is not None
    report = step.report()
    assert step.report() is report
    assert (report.step, report.schema_version) == (STEP, REPORT_SCHEMA_VERSION)
    lanes = step.lanes()
    assert [lane.name for lane in lanes] == list(WORKERS) == [row.name for row in report.workers]
    for lane, row in zip(lanes, report.workers, strict=True):
        assert length(lane.observed) / 1000 == row.span_us
        assert (lane.is_engine, lane.source.rank) == (row.replica is not None, row.rank)


def test_a_run_lists_its_steps_and_what_holds_for_all(tmp_path: Path) -> None:
    """In the order of their numbers, with the settings of the run; paths may be text."""
    for number in (10, 9):
        build_step(tmp_path, step=number)
    run = open_run(str(tmp_path))
    assert [step.step for step in run.steps()] == [9, 10]
    assert run.info() is open_run(DATA / "nccl_data.json.gz").info() is None
    assert run.check().ok
    assert not [entry for entry in run.steps()[0].check().artifacts if entry.status != "ok"]


def test_a_run_has_its_settings(tmp_path: Path) -> None:
    """What a real run left is there; a file that is none is named."""
    from verl_profiling import ProfilingCallback

    callback = ProfilingCallback(
        {"enable": True, "tool": "spans", "save_path": str(tmp_path / "run")}
    )
    callback.on_train_begin()
    callback.on_step_begin(1)
    callback.on_step_end()
    callback.on_train_end()
    info = open_run(tmp_path / "run").info()
    assert info is not None
    assert info.config["tool"] in ("spans", ["spans"])
    assert info.versions["verl-profiling"]
    (tmp_path / "run" / "run.json").write_text('{"run_id": 3}')
    with pytest.raises(TraceFormatError, match=r"run\.json: not the file of a run"):
        open_run(tmp_path / "run").info()


def test_several_steps_are_several_timelines(tmp_path: Path) -> None:
    """Plain traces of two steps share a folder and do not share a file; asked for one step,
    it lists them.
    """
    for number in (1, 2):
        name = f"actor_rank0_step{number}.json.gz"
        (tmp_path / name).write_bytes((DATA / "megatron_tp2_rank0.json.gz").read_bytes())
    written = [step.merge().path.name for step in open_run(tmp_path).steps()]
    assert written == ["timeline.step_000001.json.gz", "timeline.step_000002.json.gz"]
    run = tmp_path / "run"
    for number in (1, 2):
        build_step(run, step=number)
    with pytest.raises(
        ConfigError, match=r"path: .*run holds 2 steps; give one, e\.g\. .*step_000002"
    ):
        open_step(run)


def test_a_timeline_is_what_the_command_writes(folder: Path, tmp_path: Path) -> None:
    """Selections reduce it."""
    step = open_step(folder)
    whole = step.merge(tmp_path / "whole.json.gz")
    part = step.merge(str(tmp_path / "part.json.gz"), stages=["rollout"], ranks="0", min_us=1)
    assert 0 < part.events < whole.events
    with pytest.raises(ConfigError, match="not a list of ranks"):
        step.merge(tmp_path / "none.json.gz", ranks="")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.json.gz", "whole.json.gz"]


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> tuple[CapturedStep, CapturedStep]:
    """A step with rows in many tables, and one with hardly any."""
    full = with_facts(build_step(tmp_path_factory.mktemp("full")))
    rewrite(bare := build_step(tmp_path_factory.mktemp("empty")), workers=[], stages=[], clocks=[])
    return open_step(full), open_step(bare)


@pytest.mark.parametrize("name", [*TABLES, "requests"])
def test_frames_hold_the_numbers_of_the_report(
    name: FrameName, framed: tuple[CapturedStep, CapturedStep]
) -> None:
    """Every table has its columns and types, with rows and without."""
    pandas = pytest.importorskip("pandas")
    full, bare = framed
    frame, empty = full.to_frame(name), bare.to_frame(name)
    assert list(frame.columns) == list(empty.columns)
    assert frame.columns[0] == "step"
    assert (
        frame.dtypes.drop(object_columns(frame)) == empty.dtypes.drop(object_columns(frame))
    ).all()
    rows = [] if name == "requests" else TABLES[name].rows(full.report())
    if name == "requests":
        assert frame["latency_us"].tolist() == [200.0, 100.0]
        assert frame["begin_us"].tolist() == [0.0, 50.0]
        assert frame["first_token_us"].isna().tolist() == [True, False]
        assert frame["policy_version"].isna().tolist() == [True, False]
        assert frame["failed"].tolist() == [False, True]
    else:
        assert len(frame) == len(rows)
        assert set(frame["step"]) <= {STEP}
    if name == "workers":
        causes = frame[[column for column in frame.columns if column.startswith("lost_")]].sum(
            axis=1
        )
        pandas.testing.assert_series_equal(causes, frame["idle_us"], check_names=False)
        assert frame["replica"].isna().tolist() == [True, True, False]


def test_a_frame_that_does_not_exist_lists_those_that_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is passed for a name; without pandas the remedy is named."""
    step = open_step(folder)
    with pytest.raises(ConfigError, match="unknown table 'worker'; did you mean 'workers'"):
        step.to_frame("worker")
    for wrong in (None, 3, "__class__", "notes"):
        with pytest.raises(ConfigError, match="choose from: achieved, around_the_step, coll"):
            step.to_frame(wrong)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ToolUnavailableError, match=r"pip install 'verl-profiling\[analysis\]'"):
        open_step(folder).to_frame("stages")


def test_requests_read_no_trace(tmp_path: Path) -> None:
    """A step with thousands of requests is a frame, and a damaged trace does not matter."""
    pytest.importorskip("pandas")
    folder = build_step(tmp_path)
    for trace in folder.glob("*.torch.json.gz"):
        trace.write_bytes(b"damaged")
    begin = read_manifest(folder).begin_ns
    facts = {"replica": 0, "begin_ns": begin, "end_ns": begin + 1000, "prompt_tokens": 7}
    rewrite_worker(
        folder, "rollout0", requests=[Request(response_tokens=n, **facts) for n in range(5_000)]
    )
    frame = open_step(folder).to_frame("requests")
    assert int(frame["response_tokens"].sum()) == 5_000 * 4_999 // 2


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(tmp_path: Path) -> None:
    """One sandboxed frame that loads nothing; a hostile name in the manifest stays text."""
    folder = build_step(tmp_path)
    hostile = '"></iframe><script>alert(1)</script>'
    rewrite(folder, notes=[hostile])
    report = open_step(folder).report()
    shown = report._repr_html_()
    assert Elements(shown).tags == ["iframe"]
    assert 'sandbox="allow-scripts"' in shown
    page = unescape(shown.partition('srcdoc="')[2].partition('"')[0])
    inside = Elements(page)
    assert (inside.tags.count("script"), inside.outside) == (4, [])
    namespaces_and_links = r"http://www.w3.org/\S+|https://ui.perfetto.dev/#!"
    assert not re.search(r"(https?:)?//\w", re.sub(namespaces_and_links, "", page))
    assert hostile in unescape(page)
    assert re.fullmatch(r"<report of step 12: [\d.]+ m?s, 3 lanes, \d findings>", repr(report))


def test_nothing_there_is_said(tmp_path: Path) -> None:
    """A missing folder at once, an empty one when its steps are asked for."""
    for opening in (open_run, open_step, load_reports):
        with pytest.raises(TraceFormatError, match="no such file or folder"):
            opening(tmp_path / "gone")
    with pytest.raises(TraceFormatError, match="no step folders"):
        open_run(tmp_path).steps()
    with pytest.raises(TraceFormatError, match="no trace files"):
        open_run(tmp_path).check()


def object_columns(frame: Any) -> list[str]:
    """Return the columns of text, whose type says nothing."""
    return [column for column in frame.columns if frame[column].dtype.kind == "O"]
