"""A real loop whose slowness lasts, or is over when it is captured: what is recorded and said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
from conftest import Pool
from example_loops import settings
from test_callback import set_up

from verl_profiling import ProfilingCallback
from verl_profiling.cli import main
from verl_profiling.commands import EXIT_OK
from verl_profiling.run_files import read_manifest

USUAL_S, SLOW_S, SLOW_FROM = 0.06, 1.0, 8
TRIGGER = {"window": 6, "slow_step": None, "slow_stage": 5.0, "leader": None, "memory": None}
"""A machine that is busy with other things makes no stage five times as long twice in a row."""


@pytest.mark.parametrize("lasts", [False, True])
def test_the_report_compares_the_suspect_and_gives_no_verdict(
    tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str], lasts: bool
) -> None:
    """One rank is slow until the watch has asked for a capture, or on; the capture is of it and a peer."""
    config = settings(
        save_path=str(tmp_path),
        tool="spans",
        schedule={"steps": []},
        watch={"enable": True, "every": 3, "trigger": TRIGGER},
    )
    set_up(config, pool.sync)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", pool.sync)
    with profiling:
        for step in range(1, 18):
            profiling.on_step_begin(step)
            asked = any(tmp_path.glob("step_*"))
            slow = step >= SLOW_FROM and (lasts or not asked)
            with profiling.stage("update"):
                seconds = [SLOW_S if slow and rank == 1 else USUAL_S for rank in range(3)]
                ray.get(
                    [
                        worker.work.remote(["update_actor"], own)
                        for worker, own in zip(pool.sync, seconds, strict=True)
                    ]
                )
            profiling.on_step_end()
            if asked:
                break
    [folder] = sorted(tmp_path.glob("step_*"))
    trigger = read_manifest(folder).trigger
    assert (trigger.kind, trigger.stage, trigger.suspects) == ("anomaly", "update", ["actor_rank1"])
    assert main(["report", str(folder), "--json"]) == EXIT_OK
    rows = json.loads(capsys.readouterr().out)["suspects"]
    (stage,) = (row for row in rows if (row["kind"], row["name"]) == ("stage", "update_actor"))
    assert (stage["value"] > 5 * stage["peer_value"]) == lasts
    assert main(["report", str(folder)]) == EXIT_OK
    said = " ".join(capsys.readouterr().out.split())
    assert "Suspects" in said
    assert "it was gone" not in said
    assert "shows nothing" not in said
