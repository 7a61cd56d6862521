"""AReaL's own loop, on a CPU, with the line that profiles it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_profiling import ConfigError
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader

pytest.importorskip(
    "areal", reason="areal is not installed; `make test-areal` builds an environment"
)

from areal.utils import perf_tracer

from verl_profiling.integrations.areal import areal_profiling

pytestmark = [pytest.mark.areal, pytest.mark.usefixtures("session"), pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
TRAINED = ["rollout", "ref_log_prob", "old_log_prob", "advantage", "update_actor", "update_weights"]
AFTERWARDS = ["save_checkpoint", "checkpoint", "validate", "clear_batches", "log_stats"]
OWN_NAMES = {
    "ref_log_prob": "ref_logp",
    "old_log_prob": "recompute_logp",
    "advantage": "compute_advantage",
    "update_actor": "train_step",
    "update_weights": "update_weights",
    "save_checkpoint": "save",
}
WITHIN_S = 0.001


def settings(folder: Path) -> dict[str, Any]:
    """Return settings that profile the second step without a profiler."""
    return {"enable": True, "tool": "spans", "save_path": str(folder), "schedule": {"steps": [2]}}


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_a_step_has_the_loops_stages(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as AReaL says where nothing starts in them; merged, reported and checked."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "recipes.areal_tiny.train",
            "--profiling",
            mode,
            f"cluster.fileroot={tmp_path}",
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "profiling"
    for step in (2, 3):
        manifest = read_manifest(run / f"step_{step:06d}")
        (worker,) = manifest.workers
        assert (worker.name, worker.status, worker.mode) == ("actor_rank0", "ok", mode)
        assert [span.name for span in manifest.stages] == TRAINED + AFTERWARDS
        assert [span.name for span in worker.stages] == TRAINED + AFTERWARDS
        assert (manifest.complete, manifest.policy_version) == (True, step - 1)
        lasted = {span.name: (span.end_ns - span.begin_ns) / 1e9 for span in manifest.stages}
        for name, own in OWN_NAMES.items() if mode == "e2e" else ():
            measured = re.findall(rf"timeperf/{own} *│ *([\d.e+-]+)", done.stdout + done.stderr)
            assert lasted[name] == pytest.approx(float(measured[step - 1]), abs=WITHIN_S), name
    assert {summary.step for summary in WatchLogReader(run).read()} == {1, 2, 3, 4}
    assert main(["check", str(run)]) == 0
    assert main(["merge", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run / "step_000002"), "--json"]) == 0
    stages = {stage["name"] for stage in json.loads(capsys.readouterr().out)["stages"]}
    assert stages >= set(TRAINED)


def train(steps: int, ends: str = "log_stats") -> None:
    """Open the scopes that AReaL's loop opens, and others."""
    for step in range(steps):
        for part in ("rollout", "ppo_update", ends):
            with (
                perf_tracer.trace_scope(f"train.{part}", args={"global_step": step}),
                perf_tracer.trace_scope("fsdp_engine.forward"),
            ):
                if part == "raises":
                    raise LookupError("no update")


def test_where_the_engines_are_elsewhere_the_loop_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single-controller mode there is no worker in this process; other scopes are left alone."""
    monkeypatch.delenv("AREAL_SPMD_MODE", raising=False)
    with areal_profiling(settings(tmp_path)):
        train(3)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000002"]
    manifest = read_manifest(tmp_path / "step_000002")
    assert [span.name for span in manifest.stages] == ["rollout", "update_actor", "log_stats"]
    assert manifest.workers == []


def test_an_exception_is_the_users_and_costs_no_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It propagates, the stage is marked, and AReaL's function is back in its place."""
    monkeypatch.setenv("AREAL_SPMD_MODE", "1")
    before = perf_tracer.trace_scope
    config = settings(tmp_path) | {"schedule": {"steps": [1]}}
    with pytest.raises(LookupError, match="no update"), areal_profiling(config):
        train(1, ends="raises")
    assert perf_tracer.trace_scope is before
    manifest = read_manifest(tmp_path / "step_000001")
    assert not manifest.complete
    assert [(span.name, span.failed) for span in manifest.stages if span.failed] == [
        ("raises", True)
    ]


def test_switched_off_or_set_up_wrongly_nothing_is_replaced(tmp_path: Path) -> None:
    """Wrong settings raise before the training, with the key that is wrong."""
    before = perf_tracer.trace_scope
    with areal_profiling({"enable": False, "save_path": str(tmp_path / "off")}):
        assert perf_tracer.trace_scope is before
        train(3)
    assert not (tmp_path / "off").exists()
    with (
        pytest.raises(ConfigError, match="shedule"),
        areal_profiling({"enable": True, "shedule": {}}),
    ):
        pass
    assert perf_tracer.trace_scope is before
