"""A loop that is killed in a captured step: what the step's folder says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from conftest import ROOT
from step_outcome import recorded, verdict

PROGRAM = Path(__file__).with_name("lost_process_program.py")


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run the loop; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def address() -> str:
    """Return where the tests' Ray is."""
    found: str = ray.get_runtime_context().gcs_address
    return found


@pytest.mark.parametrize("where", ["here", "in Ray"])
def test_a_loop_that_is_killed_in_a_step_leaves_no_worker_out(
    tmp_path: Path, ray_cluster: None, where: str
) -> None:
    """The step before is whole; ``check`` names the open one, with a reason for each worker in it."""
    status, _, said = run(tmp_path, *([] if where == "here" else [address()]))
    assert status == -signal.SIGKILL, said
    before, killed = (tmp_path / "run" / f"step_{step:06d}" for step in (1, 2))
    expected = ["actor_rank0"] if where == "here" else ["actor_rank0", "actor_rank1"]
    assert verdict(before)[0] == 0, said
    manifest = recorded(killed)
    assert (manifest.step, manifest.complete) == (2, False)
    assert sorted(worker.name for worker in manifest.workers) == expected
    assert all(worker.status == "ok" or worker.reason for worker in manifest.workers)
    status, not_ok = verdict(killed)
    assert status == 1
    assert re.search("killed|never written", not_ok), not_ok
    for worker in manifest.workers:
        assert worker.status == "ok" or worker.name in not_ok, not_ok
    status, not_ok = verdict(tmp_path / "run")
    assert (status, "step_000002" in not_ok, "step_000001" in not_ok) == (1, True, False), not_ok
    for part in (tmp_path / "run").rglob(".*.part*"):
        part.unlink()  # the file that the killed process was writing
