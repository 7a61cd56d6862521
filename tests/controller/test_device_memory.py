"""Memory of a card at hand-offs between a trainer and an engine, two real processes.

The card is a stand-in of the hardware, see ``card_loop.py``: no accelerator is in this machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from card_loop import CONTEXT, GB, OVERLAP_S, STEPS, TOTAL

from verl_profiling.analysis import open_run
from verl_profiling.cli import main
from verl_profiling.files.watch_log import read_watch_log

LOOP = Path(__file__).with_name("card_loop.py")


def test_the_hand_off_at_which_the_least_was_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With who held what, and what was held twice; no reading waits for the device, or uses another
    one, and the loop's process reads none.
    """
    done = subprocess.run(
        [sys.executable, LOOP, tmp_path, "well"], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["MainThread", "verl-profiling-hangs"]
    for step in read_watch_log(tmp_path):
        least = step.hand_off
        assert least is not None
        assert least.overlap is not None
        assert (least.before, least.after) == ("update_actor", "offload")
        assert (least.free_bytes, least.total_bytes) == (2 * GB, TOTAL)
        held = {holder.lane: (holder.held_bytes, holder.cached_bytes) for holder in least.holders}
        assert held == {"actor_rank0": (50 * GB, 6 * GB), "": (26 * GB + CONTEXT, 0)}
        assert (least.overlap.size_bytes, least.overlap.other) == (25 * GB, "")
        assert least.overlap.least_ns <= OVERLAP_S * 1e9 <= least.overlap.most_ns
        rows = {row.stage: row for row in step.devices}
        sizes = {name: (row.begin_bytes, row.end_bytes) for name, row in rows.items()}
        # The first stage of a process is not read at its begin, as its device is not known then.
        begin = None if step.step == 1 else 20 * GB
        assert sizes == {"update_actor": (begin, 44 * GB), "offload": (44 * GB, 20 * GB)}
        assert rows["update_actor"].peak_bytes == 44 * GB
    assert main(["report", str(tmp_path), "--save"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    sentence = "actor_rank0 50 GB (cached 6 GB), others 28 GB; actor_rank0 and others held 25 GB"
    assert "between update_actor and offload: " + sentence in shown
    assert "before offload, and 27 GB are free" in shown
    assert sentence in (tmp_path / "index.html").read_text()


def test_who_held_the_card_when_it_was_full(tmp_path: Path) -> None:
    """Of the moment of the failure, as the error leaves its stage before anything is freed."""
    done = subprocess.run([sys.executable, LOOP, tmp_path, "full"], stderr=subprocess.DEVNULL)
    assert done.returncode != 0
    [death] = [one.reason for one in open_run(tmp_path).check().artifacts if one.status == "failed"]
    assert death.startswith(f"actor_rank0 went first in step {STEPS}, update_actor, at {LOOP}:")
    assert death.endswith(
        ": out of device memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 27.94 "
        "GiB.; 18 GB of 80 GB was free; actor_rank0 held 20 GB (cached 0 bytes), others 42 GB"
    )
