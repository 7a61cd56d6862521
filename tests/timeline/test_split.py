"""An e2e capture cut at its stages is the discrete view of the same step."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from step_folders import build_step, read_events, recordings

from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME
from verl_profiling.report.build import build_report
from verl_profiling.report.check import check
from verl_profiling.run_files import read_manifest, write_json_atomically
from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.split import split_step


def test_the_files_are_those_of_discrete_mode(tmp_path: Path) -> None:
    """Same names, and a manifest under which the folder passes the check."""
    folder = build_step(tmp_path / "e2e")
    (inputs,) = find_steps(folder)
    written = split_step(inputs)
    discrete = build_step(tmp_path / "discrete", mode="discrete")
    expected = {a.path for w in read_manifest(discrete).workers for a in w.artifacts}
    assert {path.name for path in written} == expected
    assert check(folder / "split").ok


@pytest.mark.parametrize("clock_ns", [0, 1_234_567_891])
def test_a_stage_holds_what_began_in_it(tmp_path: Path, clock_ns: int) -> None:
    """Each operator inside the stage is there, unchanged, and the stage's own mark."""
    folder = build_step(tmp_path, rank1_clock_ns=clock_ns)
    (inputs,) = find_steps(folder)
    split_step(inputs)
    events = read_events(folder / "split" / "actor_rank1.update_actor.torch.json.gz")
    whole = read_events(folder / "actor_rank1.torch.json.gz")
    operators = [event for event in whole if event.get("cat") == "cpu_op"]
    assert [event for event in events if event.get("cat") == "cpu_op"] == operators
    assert "update_actor" in {event["name"] for event in events}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"}


def test_both_views_report_the_same_work(tmp_path: Path) -> None:
    """Busy time by lane is that of the e2e trace, in a span that is the stage."""
    folder = build_step(tmp_path)
    (e2e,) = find_steps(folder)
    split_step(e2e)
    (discrete,) = find_steps(folder / "split")
    before = {row.name: row for row in build_report(e2e).workers}
    for row in build_report(discrete).workers:
        stage = recordings()[row.name].stage
        assert row.busy_us == pytest.approx(before[row.name].busy_us)
        assert row.span_us == pytest.approx((stage.end_ns - stage.begin_ns) / 1000)


def test_a_discrete_capture_cannot_be_split(tmp_path: Path) -> None:
    """It is cut already, and the error says so instead of writing nothing."""
    (inputs,) = find_steps(build_step(tmp_path, mode="discrete"))
    with pytest.raises(TraceFormatError, match="no e2e trace"):
        split_step(inputs)
    assert not (inputs.directory / "split").exists()


def test_an_engine_without_stages_is_cut_at_the_controllers_rollout(tmp_path: Path) -> None:
    """An engine driven by requests marks nothing itself; its window is that of discrete mode."""
    folder = build_step(tmp_path)
    manifest = read_manifest(folder)
    workers = [msgspec.structs.replace(w, stages=[]) if w.name == "rollout0" else w for w in manifest.workers]
    write_json_atomically(folder / MANIFEST_NAME, msgspec.structs.replace(manifest, workers=workers))
    (inputs,) = find_steps(folder)
    names = [path.name for path in split_step(inputs)]
    assert "rollout0_rank0.rollout.torch.json.gz" in names
    whole, part = (
        [event for event in read_events(path) if event.get("cat") == "cpu_op"]
        for path in (
            folder / "rollout0_rank0.torch.json.gz",
            folder / "split" / "rollout0_rank0.rollout.torch.json.gz",
        )
    )
    assert len(part) == len(whole) > 0
