"""The wall clock is set while a step is captured, as by NTP or by hand: durations are monotonic."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import RunPython

from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest

SOURCE = Path(__file__).parents[1] / "settable_clock.c"
HOUR_S = 3600
LOOP = """
import ctypes, sys, time
from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

settings = {"enable": True, "tool": "spans", "save_path": sys.argv[1],
            "schedule": {"steps": [4, 5, 6]}}
settings["watch"] = {"enable": sys.argv[3] == "watched", "every": 1}
worker = CaptureMixin()
worker.init_capture(settings, role="actor", rank=0, world_size=1)
with ProfilingCallback(settings) as profiling:
    profiling.add_workers("actor", worker)
    for step in range(1, 9):
        profiling.on_step_begin(step)
        with profiling.stage("update"), stage("forward"):
            time.sleep(0.02)
            if step == 5:
                ctypes.CDLL(None).set_clock_ahead(ctypes.c_longlong(int(sys.argv[2]) * 10**9))
            time.sleep(0.02)
        with stage("backward"):
            time.sleep(0.02)
        profiling.on_step_end()
    print(time.time() - profiling.last_folder.stat().st_mtime)
for summary in profiling.watch.summaries if profiling.watch is not None else ():
    names = [name for use in summary.workers for name in use.stages.split(chr(10))]
    print(summary.step, summary.duration_ns / 1e9, *names, sep=",", file=sys.stderr)
"""


@pytest.mark.parametrize(("by_s", "watched"), [(-HOUR_S, "watched"), (HOUR_S, "captures alone")])
def test_a_clock_that_is_set_in_a_captured_step_changes_no_duration(
    tmp_path: Path,
    by_s: int,
    watched: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    run_python: RunPython,
) -> None:
    """Of the step, of its stages, and of what lies around it; the check finds all files whole."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    library, run = tmp_path / "settable_clock.so", tmp_path / "run"
    subprocess.run(["cc", "-Wall", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    done = run_python(LOOP, run, by_s, watched)
    monkeypatch.delenv("LD_PRELOAD")
    assert abs(float(done.stdout) - by_s) < HOUR_S / 2, "the stand-in has set no clock"
    assert main(["check", str(run)]) == 0, capsys.readouterr().out
    for step in (4, 5, 6):
        manifest = read_manifest(run / f"step_{step:06d}")
        [worker] = manifest.workers
        spans = [*manifest.stages, *worker.stages, *manifest.around_the_step]
        assert {"update", "forward", "backward"} <= {span.name for span in spans}
        seconds = [(span.end_ns - span.begin_ns) / 1e9 for span in (*manifest.step_spans, *spans)]
        assert all(0 <= found < 60 for found in seconds), seconds
        begins = [span.begin_ns / 1e9 for span in spans]
        assert max(begins) - min(begins) < 60
        assert main(["report", str(run / f"step_{step:06d}")]) == 0
        [said] = re.findall(r"^Step: (.*?),", capsys.readouterr().out, re.MULTILINE)
        assert 60 <= float(said.removesuffix(" ms")) < 60_000
    summaries = [line.split(",") for line in done.stderr.splitlines() if line[0].isdigit()]
    assert [int(step) for step, *_ in summaries] == (
        list(range(1, 9)) if watched == "watched" else []
    )
    for step, seconds, *names in summaries:
        assert 0 < float(seconds) < 60, step
        assert names == ["forward", "backward"] or int(step) > 5, step
    first, last = (read_manifest(run / f"step_{step:06d}").begin_ns for step in (4, 6))
    assert abs((last - first) / 1e9 - by_s) < 60, "the next step is at the time that the clock says"
