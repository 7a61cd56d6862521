"""A loop of which planted parts teach nothing, by task: the report, the watch, and a stopwatch."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from verl_profiling import ProfilingCallback, stage, trajectory, trajectory_status
from verl_profiling.cli import main
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.watch.log_writer import values_of
from verl_profiling.workers import AgentLoopCaptureMixin

# Of each group: its task and environment, rewards, which samples were cut off, and what each taught
# (training has samples that were cut off, unless a status says otherwise)
GROUPS: list[tuple[str, str | None, list[float | None], list[int], str | list[str]]] = [
    ("math", None, [1.0, 1.0, 1.0], [], "equal rewards"),
    ("math", None, [0.0, 1.0], [], ""),
    ("math", None, [0.0, None], [], ""),
    ("code", "docker", [0.0, 1.0, 1.0], [1], ["", "truncated", ""]),
    ("code", "docker", [0.0, 1.0], [0], ""),
    ("code", "docker", [0.0, 1.0], [], "filtered"),
    ("code", "docker", [0.5, 0.5], [0], "equal rewards"),
    ("code", "browser", [1.0, 0.0], [], "stale"),
    ("code", "browser", [1.0, 0.0], [], ["aborted", ""]),
]
# Of each micro-batch: tasks, lengths, advantages, masks and reasons of its sequences
BATCHES = [
    (["math", "code"], [300, 100], [0.5, 0.0], [200, 50], None),
    (["math", "code"], [300, 100], [0.0, 0.5], [200, 0], None),
    (["math", "math"], [100, 100], [0.5, 0.5], [0, 50], ["truncated", ""]),
    (["code", "code"], [100, 100], [0.5, 0.0], [0, 0], ["", "stale"]),
]
FACTS = ("tasks", "lengths", "advantages", "masks", "reasons")
TAUGHT = [
    ["", "equal rewards"],
    ["equal rewards", "masked"],
    ["truncated", ""],
    ["masked", "stale"],
]

Stopwatch = dict[tuple[str, str], float]


async def roll_out() -> Stopwatch:
    """Play the groups at once; set statuses afterwards, as dynamic sampling does."""
    took = defaultdict[tuple[str, str], float](float)

    async def play(number: int, sample: int) -> None:
        task, environment, rewards, cut, taught = GROUPS[number]
        cause = taught if isinstance(taught, str) else taught[sample]
        facts = {} if environment is None else {"environment": environment}
        begun_s = time.monotonic()
        async with trajectory(group=number, sample=sample, task=task, **facts) as made:
            await asyncio.sleep(0.5 + 0.1 * ((number + sample) % 3))
            made.add(truncated=sample in cut)
            if rewards[sample] is not None:
                made.add(reward=rewards[sample])
            if cause in ("aborted", "truncated"):
                made.status = cause
        label = task if environment is None else f"{task} in {environment}"
        took[label, cause] += time.monotonic() - begun_s

    async def validate() -> None:
        async with trajectory(group="validation", task="math", validate=True, reward=1.0):
            await asyncio.sleep(0.1)

    samples = [(number, at) for number, group in enumerate(GROUPS) for at in range(len(group[2]))]
    await asyncio.gather(validate(), *(play(*sample) for sample in samples))
    for number, group in enumerate(GROUPS):
        if group[4] in ("filtered", "stale"):
            trajectory_status(number, group[4])
    return dict(took)


def facts_of(lists: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(FACTS, lists, strict=True))


class Worker(AgentLoopCaptureMixin):
    """One process that plays and trains."""

    def update(self) -> Stopwatch:
        """Train 2 ms a token."""
        took = defaultdict[tuple[str, str], float](float)
        whole: list[list[Any]] = [[], [], [], [], []]
        for batch in BATCHES:
            for items, of_batch in zip(whole, batch, strict=True):
                items += of_batch or [""] * len(batch[0])
        with stage("update_actor").given(**facts_of(whole)):
            for (tasks, lengths, advantages, masks, reasons), taught in zip(
                BATCHES, TAUGHT, strict=True
            ):
                begun_s = time.monotonic()
                facts = (tasks, lengths, advantages, masks, reasons)
                with stage("micro_batch").given(**facts_of(facts)):
                    time.sleep(sum(lengths) / 500)
                took_s = time.monotonic() - begun_s
                for task, length, cause in zip(tasks, lengths, taught, strict=True):
                    took[task, cause] += took_s * length / sum(lengths)
        return dict(took)


def useless(rows: list[dict[str, Any]]) -> Stopwatch:
    return {(row["task"], row["cause"]): row["seconds"] for row in rows}


def without_taught(took: Stopwatch) -> Stopwatch:
    return {key: seconds for key, seconds in took.items() if key[1]}


def test_what_taught_nothing_agrees_with_a_stopwatch_by_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 2%: each reason of each task, of rollout and training, in the report and the watch."""
    config = settings(
        save_path=str(tmp_path), tool="spans", schedule={"steps": [1]}, watch={"enable": True}
    )
    worker = Worker()
    worker.init_capture(config)
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("agent_loop", [worker])
        profiling.on_step_begin(1)
        with profiling.stage("rollout"):
            rollout = asyncio.run(roll_out())
        with profiling.stage("update_actor"):
            training = worker.update()
        profiling.on_step_end()
    capsys.readouterr()
    assert main(["report", str(tmp_path / "step_000001"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert useless(report["rollout"]["nothing"]) == pytest.approx(without_taught(rollout), rel=0.02)
    assert useless(report["useless_training"]) == pytest.approx(without_taught(training), rel=0.02)
    math = sum(seconds for (task, _), seconds in rollout.items() if task == "math")
    [row] = [row for row in report["rollout"]["nothing"] if row["task"] == "math"]
    assert row["share_of_task"] == pytest.approx(row["seconds"] / math, rel=0.02)
    texts = {finding["rule"]: finding["text"] for finding in report["findings"]}
    assert " of code in browser" in texts["trajectories_for_nothing"]
    assert " of math" in texts["training_for_nothing"]

    [step] = WatchLogReader(tmp_path).read()
    ns = 1e9
    for name, took in (("rollout", rollout), ("update_actor", training)):
        lessons = step.lessons[name]
        found = {
            (task, cause): time_ns / ns
            for task, of_task in lessons.items()
            for cause, time_ns in of_task.items()
        }
        # the watch has whole stages: the time between micro-batches is divided, too
        assert found == pytest.approx(took, rel=0.02, abs=0.005)
        share = sum(without_taught(took).values()) / sum(took.values())
        value = values_of(step)[f"profiling/watch/{name}/taught_nothing"]
        assert value == pytest.approx(share, rel=0.02)
        assert f"profiling/watch/{name}/taught_nothing/math" in values_of(step)
    assert main(["top", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "of rollout taught nothing: " in shown
    assert "of update_actor taught nothing: " in shown
