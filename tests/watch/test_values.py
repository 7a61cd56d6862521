"""The numbers of a step, and TensorBoard, which draws them."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from drawn_summaries import MS, summary

from verl_profiling import ProfilingCallback
from verl_profiling.files.step_summary import SpanTotal
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.watch.log_writer import values_of


def test_a_stage_has_exposed_time_leader_and_imbalance() -> None:
    """Beside duration and memory; no leader has no rank, and a clock that was set back no time."""
    values = values_of(summary(7))
    assert values["profiling/watch/step_s"] == 9.5
    assert values["profiling/watch/rollout/exposed_s"] == 5.0
    assert values["profiling/watch/rollout/leader_rank"] == 2.0
    assert values["profiling/watch/rollout/imbalance"] == 1.25
    assert values["profiling/watch/in_no_stage/exposed_s"] == 0.5
    assert "profiling/watch/in_no_stage/imbalance" not in values
    assert values["profiling/watch/memory/actor/peak_bytes"] == 9e9
    assert values["profiling/watch/memory/actor/held_bytes"] == 3e9
    made = summary(7)
    back = msgspec.structs.replace(made, end_ns=made.begin_ns - 3600 * 10**9)
    assert values_of(back)["profiling/watch/step_s"] == 0
    for step in (summary(1, leader=""), summary(1, leader="somebody")):
        assert "profiling/watch/rollout/leader_rank" not in values_of(step)


def test_the_spans_of_trajectories_have_their_sum_and_number() -> None:
    spans = [SpanTotal("tool:search", 240, 12_300 * MS, 3)]
    one, *others = summary(7).workers
    workers = [
        msgspec.structs.replace(one, spans=spans),
        msgspec.structs.replace(others[0], spans=spans),
    ]
    step = msgspec.structs.replace(summary(7), workers=workers)
    step.add_up()
    values = values_of(step)
    found = {name: value for name, value in values.items() if "/spans/" in name}
    assert found == {
        "profiling/watch/spans/tool:search/total_s": 24.6,
        "profiling/watch/spans/tool:search/count": 480.0,
        "profiling/watch/spans/tool:search/failed": 6.0,
    }


def test_a_run_has_its_log_and_its_curves(tmp_path: Path) -> None:
    """With one line of settings, from a loop that captures nothing;
    a listener has the numbers, too.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    watch = {"enable": True, "sinks": ["tensorboard"]}
    callback = ProfilingCallback(
        {"enable": True, "save_path": str(tmp_path), "schedule": {"steps": []}, "watch": watch}
    )
    heard = []
    callback.watch.listeners.append(
        lambda summary: heard.append(values_of(summary)["profiling/watch/step_s"])
    )
    with callback:
        for step in range(4):
            callback.on_step_begin(step)
            with callback.stage("update_actor"):
                time.sleep(0.002)
            callback.on_step_end()
    read = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = read.Scalars("profiling/watch/update_actor/exposed_s")
    assert [point.step for point in points] == [0, 1, 2, 3]
    assert all(point.value >= 0.002 for point in points)
    assert {step.step for step in WatchLogReader(tmp_path).read()} == {0, 1, 2, 3}
    assert len(heard) == 4
