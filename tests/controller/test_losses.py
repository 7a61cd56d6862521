"""The loop does not wait for its own disk, and everything that is lost is named."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import RunPython
from test_callback import configured, following, local_worker, pass_steps, run

from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_manifest, read_run
from verl_profiling.files.watch_log import read_watch_log
from verl_profiling.steps.check import check

SOURCE = Path(__file__).parents[1] / "slow_disk.c"


def test_a_disk_that_is_slow_or_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    """At most two file calls are the loop's own in each hook;
    manifests are written once they can be.
    """
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library, runs = tmp_path / "slow_disk.so", tmp_path / "runs"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    for name, value in {
        "DISK": runs,
        "DISK_CONTROL": tmp_path / "control",
        "DISK_LOG": tmp_path / "log",
    }.items():
        monkeypatch.setenv(name, str(value))
    (tmp_path / "log").touch()
    monkeypatch.setenv("LD_PRELOAD", str(library))
    done = run_python(f"from tests.controller.slow_disk_loop import main; main({str(runs)!r})")
    monkeypatch.delenv("LD_PRELOAD")
    for kind, hooks in json.loads(done.stdout.splitlines()[-1]).items():
        assert max(map(len, hooks)) <= 2, (kind, hooks)
    assert len((tmp_path / "log").read_text().splitlines()) > 100, (
        "the shim saw the background's calls"
    )
    late = runs / "late"
    info = read_run(late)
    assert info is not None
    assert info.captured == sorted(path.name for path in late.glob("step_*"))
    assert not {*info.captured} & {"step_000002", "step_000003"}, "a late folder is no capture"
    assert "timeouts.start_s" in info.not_captured[2], info.not_captured
    assert "an earlier step is still" in info.not_captured[3]
    for folder in {*runs.iterdir()} - {late}:
        checked = check(folder)
        assert checked.ok, (folder.name, checked, done.stderr)
        for step in folder.glob("step_*"):
            assert read_manifest(step).state == "written"


def test_without_a_further_thread_steps_are_captured(tmp_path: Path, session: Session) -> None:
    """Their folders and manifests are written by the hooks themselves."""
    config = configured(tmp_path, schedule={"steps": [1, 3]})
    with following(config) as callback:
        before = threading.stack_size(1 << 47)  # no thread has so much room
        try:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                threading.Thread(target=print).start()
            pass_steps(callback, 1, 2, 3)
        finally:
            threading.stack_size(before)
        assert check(Path(config.save_path)).ok
        assert len(list(Path(config.save_path).glob("step_*"))) == 2


@pytest.mark.parametrize("seed", range(3))
def test_a_manifest_that_is_written_late_costs_nothing(
    tmp_path: Path, session: Session, seed: int
) -> None:
    """The hook after the capture runs, later metrics are kept,
    and strict settings raise nothing.
    """
    draw = random.Random(seed)
    step, shipped = draw.randint(1, 9), tmp_path / "shipped"
    after = {"ship": {"command": ["touch", str(shipped)]}}
    config = configured(tmp_path, schedule={"steps": [step]}, after=after, strict=True)
    with following(config) as callback:
        callback.on_step_begin(step)
        path = Path(config.save_path) / f"step_{step:06d}" / "manifest.json"
        aside = path.rename(tmp_path / "aside")
        path.mkdir()  # nothing can be written in its place
        callback.on_step_end({"loss": 0.5})
        if draw.random() < 0.5:
            path.rmdir()
            aside.rename(path)
        callback.add_metrics(step, {"reward": 0.25})
        if path.is_dir():
            path.rmdir()
    assert read_manifest(path.parent).metrics == {"loss": 0.5, "reward": 0.25}
    assert shipped.exists()
    assert check(path.parents[1]).ok


@pytest.mark.parametrize("seed", range(8))
def test_a_captured_step_is_expected(tmp_path: Path, session: Session, seed: int) -> None:
    """Its folder may be removed or renamed: `check` names it, but for those of `keep_last`."""
    draw = random.Random(seed)
    steps, keep_last = draw.sample(range(1, 30), 5), draw.choice((None, 2, 4))
    config = configured(
        tmp_path, tool="spans", schedule={"steps": sorted(steps)}, limits={"keep_last": keep_last}
    )
    run(following(config, local_worker(config)), lambda step: None, 30)
    folder = Path(config.save_path)
    assert check(folder).ok
    captured = sorted(folder.glob("step_*"))
    info = read_run(folder)
    assert info is not None
    assert info.captured == [path.name for path in captured]
    assert len(info.removed) == (5 - keep_last if keep_last else 0)
    lost = draw.choice(captured)
    draw.choice((lambda: shutil.rmtree(lost), lambda: lost.rename(folder / f"old_{lost.name}")))()
    [entry] = [entry for entry in check(folder).artifacts if entry.status == "missing"]
    assert entry.path == lost.name


def test_a_watch_that_is_outrun_says_what_it_left_out(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Every step has a summary or is counted, and no more than a thousand steps wait."""
    config = configured(
        tmp_path, schedule={"steps": []}, watch={"enable": True, "steps": 16, "every": 1}
    )
    worker, goes_on = local_worker(config), threading.Event()
    callback, read = following(config, worker), worker.read_watch

    def slow(question: object) -> object:
        goes_on.wait(60)
        return read(question)

    worker.read_watch = slow
    with callback:
        pass_steps(callback, *range(1, 3001))
        goes_on.set()
    logged = [step.step for step in read_watch_log(Path(config.save_path))]
    left_out = sum(int(number) for number in re.findall(r"watch: (\d+) steps before", caplog.text))
    assert left_out > 1500
    assert len(logged) + left_out == 3000
    assert logged[-1] == 3000


def test_metrics_without_a_bound_are_cut(tmp_path: Path, session: Session) -> None:
    """A loop that hands over a number per parameter keeps the first ones, and is told once."""
    config = configured(tmp_path, tool="spans")
    with following(config) as callback:
        callback.on_step_begin(2)
        callback.on_rollout_begin()
        callback.on_rollout_end({str(number): number for number in range(30_000)})
        callback.on_step_end({str(number): number for number in range(30_000)})
    written = read_manifest(Path(config.save_path) / "step_000002")
    assert len(written.metrics) == 10_000
    assert [note for note in written.notes if "metrics" in note] == [
        "metrics after the first 10,000 were left out"
    ]
