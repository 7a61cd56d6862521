"""Ranks that torchrun started, and that end in a captured step: what its folder says to a user."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from step_outcome import is_ok, reasons, recorded, verdict

PROGRAM = Path(__file__).with_name("rank_end_program.py")

pytestmark = pytest.mark.timeout(180)


def train(folder: Path, ending: str) -> str:
    """Run two ranks under torchrun; return what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    with subprocess.Popen(
        [*command, str(PROGRAM), str(folder / "run"), ending],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        try:
            if ending == "cancelled":
                deadline = time.monotonic() + 60
                while not (folder / "rank_0_waits").exists() and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(1)
                job.send_signal(signal.SIGTERM)
            return job.communicate(timeout=120)[0]
        finally:
            job.terminate()  # it ends its ranks, where they have not ended


@pytest.mark.parametrize("ending", ["raises", "os._exit"])
def test_a_step_that_another_rank_left_early_is_not_called_whole(tmp_path: Path, ending: str) -> None:
    """``check`` fails and names rank 1, with the error if there was one; rank 0 keeps what it recorded."""
    said = train(tmp_path, ending)
    before, left = (tmp_path / "run" / f"step_{step:06d}" for step in (1, 2))
    assert (verdict(before)[0], is_ok(recorded(before))) == (0, True), said
    manifest = recorded(left)
    status, not_ok = verdict(left)
    first, second = sorted(manifest.workers, key=lambda worker: worker.identity.rank)
    assert [artifact.status for artifact in first.artifacts] == ["ok"], said
    assert first.status == "ok"
    assert (second.name, is_ok(manifest)) == ("actor_rank1", False), said
    assert status == 1, said
    assert re.search("rank ?1", not_ok), not_ok
    assert "out of memory" in reasons(manifest) or ending != "raises"


@pytest.mark.parametrize("ending", ["killed", "cancelled"])
def test_rank_0_that_is_ended_while_it_waits_for_another_writes_the_step(tmp_path: Path, ending: str) -> None:
    """A rank on another host is killed, or the job is cancelled while a rank hangs: torchrun ends rank 0."""
    said = train(tmp_path, ending)
    step = tmp_path / "run" / "step_000002"
    manifest = recorded(step)
    first, second = sorted(manifest.workers, key=lambda worker: worker.identity.rank)
    assert (first.status, [artifact.status for artifact in first.artifacts]) == ("ok", ["ok"]), said
    assert manifest.state == "written", said
    assert manifest.complete or re.search("SIGTERM|SystemExit: 143", reasons(manifest)), reasons(manifest)
    assert second.name == "actor_rank1"
    assert second.reason or (ending == "cancelled" and second.status == "ok")
    assert verdict(step)[0] == 1
