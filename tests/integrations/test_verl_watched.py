"""The watch in whole runs of real verl: its summaries, what it is asked for,
and what it asks for itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from integrations.asking_verl import ANSWERS, REQUESTS, SLOW
from integrations.verl_runs import PLUGINS, ROOT, Run, run_verl
from verl_profiling.analysis import open_step
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.manifest import Manifest
from verl_profiling.numbers.given_work import NO_WORK
from verl_profiling.watch.log_writer import PREFIX

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

ASKING = f"{PLUGINS},integrations.asking_verl"
STEPS = 14
VALIDATED, SAVED = 4, 5
FIRST_SLOW, SLOW_S = 11, 5.0
"""From this update on rank 1 takes so much longer or more, behind its last exchange with rank 0."""
NOTICING = (
    "profiling=e2e",
    "profiling.schedule.steps=[]",
    "profiling.watch.every=2",
    "profiling.watch.trigger={slow_stage:3,slow_step:null,leader:null,memory:null,window:6,cooldown:2}",
    "trainer.total_epochs=4",
)


@dataclass(frozen=True)
class Watched:
    """A run with the watch on, and what it logged."""

    run: Run
    steps: Mapping[int, StepSummary]
    asked: list[dict[str, Any]]
    logged: list[tuple[int, dict[str, float]]]

    def requested(self, when: str, step: int) -> Manifest:
        """Return the one capture of what was asked in a step."""
        (asked,) = [one for one in self.asked if (one["when"], one["step"]) == (when, step)]
        assert asked["code"] == 0, asked
        found = map(read_manifest, self.run.save_path.glob("step_*"))
        [capture] = [
            one for one in found if one.trigger.request and one.trigger.request in asked["said"]
        ]
        return capture


def watched(folder: Path, requests: dict[str, Any], *overrides: str, **given: Any) -> Watched:
    metrics = folder / "metrics.jsonl"
    asked = {"folder": str(folder / "profiling"), **requests}
    run = run_verl(
        folder,
        *NOTICING,
        f"trainer.default_local_dir={folder}/checkpoints",
        *overrides,
        PLUGINS=ASKING,
        VERL_FILE_LOGGER_PATH=str(metrics),
        **{REQUESTS: json.dumps(asked)},
        **given,
    )
    assert run.code == 0, run.output[-4000:]
    answers = run.save_path / ANSWERS
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return Watched(
        run=run,
        steps={line.step: line for line in WatchLogReader(run.save_path).read()},
        asked=[json.loads(line) for line in answers.read_text().splitlines()] if requests else [],
        logged=[(line["step"], line["data"]) for line in lines],
    )


def assert_adds_up(steps: Mapping[int, StepSummary]) -> None:
    """The rows of each step are the step, to the nanosecond, and every worker was read."""
    for step in steps.values():
        assert sum(row.exposed_ns for row in step.exposed) == step.end_ns - step.begin_ns
        assert len({row.name for row in step.exposed}) == len(step.exposed)


def rows_of(step: StepSummary) -> dict[str, Any]:
    """Return the rows of a step by stage."""
    return {row.name: row for row in step.exposed}


class TestSynchronous:
    """GRPO with two ranks and two replicas; somebody asks three times,
    and in the end rank 1 is late.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, tmp_path_factory: pytest.TempPathFactory) -> Watched:
        """It validates and saves every few steps, and has three trackers."""
        folder = tmp_path_factory.mktemp("watched")
        return watched(
            folder,
            {
                "validation": {
                    VALIDATED: [],
                    2 * VALIDATED: ["--roles", "rollout", "--replicas", "1"],
                },
                "checkpoint": {SAVED: ["--roles", "actor", "--ranks", "1"]},
            },
            f"trainer.total_training_steps={STEPS}",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=2",
            "ray_kwargs.ray_init.num_cpus=16",
            f"trainer.test_freq={VALIDATED}",
            "data.val_max_samples=4",
            f"trainer.save_freq={SAVED}",
            "trainer.logger=[console,tensorboard,file]",
            TENSORBOARD_DIR=str(folder / "tensorboard"),
            **{SLOW: json.dumps({"rank": 1, "first": FIRST_SLOW, "seconds": SLOW_S, "times": 5})},
        )

    def test_every_step_is_accounted_for(self, run: Watched) -> None:
        """Captured or not, of all processes; of agent loops,
        engines and rewards the first are named.
        """
        assert sorted(run.steps) == list(range(1, STEPS + 1))
        assert_adds_up(run.steps)
        for step in run.steps.values():
            rows = rows_of(step)
            assert {
                "rollout",
                "old_log_prob",
                "advantage",
                "update_actor",
                "update_weights",
            } <= rows.keys()
            assert (rows["rollout"].role, rows["rollout"].leader) == ("agent_loop", "")
            assert {rows[name].role for name in ("old_log_prob", "update_actor")} == {"actor"}
            assert ("save_checkpoint" in rows) == (step.step % SAVED == 0 or step.step == STEPS)
            processes = {memory.role: memory.processes for memory in step.memory}
            assert processes == {
                "controller": 1,
                "actor": 2,
                "agent_loop": 1,
                "reward": 1,
                "rollout": 2,
            }
            assert step.policy_version == step.step - 1

    def test_verls_trackers_have_the_numbers_of_the_log(self, run: Watched) -> None:
        """TensorBoard and the file: under the watch's step, each once,
        beside verl's own numbers.
        """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run.run.save_path.parent / "tensorboard"))
        events.Reload()
        found = {
            name: {point.step: point.value for point in events.Scalars(name)}
            for name in events.Tags()["scalars"]
            if name.startswith(PREFIX)
        }
        in_file = {step: data for step, data in run.logged if f"{PREFIX}step" in data}
        assert found[f"{PREFIX}step_s"].keys() == in_file.keys() == run.steps.keys()
        for number, step in run.steps.items():
            assert in_file[number][f"{PREFIX}step_s"] == pytest.approx(step.seconds)
            drawn = {name: points[number] for name, points in found.items() if number in points}
            assert drawn == pytest.approx(in_file[number], rel=1e-6)
        late = in_file[FIRST_SLOW]
        assert late[f"{PREFIX}update_actor/leader_rank"] == 1
        assert late[f"{PREFIX}memory/actor/peak_bytes"] > 1e8

    def test_what_is_asked_in_a_validation_waits_for_the_next_step(self, run: Watched) -> None:
        """It is answered with the step behind, as a whole, of which the validation is no part."""
        manifest = run.requested("validation", VALIDATED)
        assert (manifest.step, manifest.complete, manifest.policy_version) == (
            VALIDATED + 1,
            True,
            VALIDATED,
        )
        assert {worker.status for worker in manifest.workers} == {"ok"}
        assert len(manifest.workers) == 6
        assert "validate" not in {
            span.name for span in (*manifest.stages, *manifest.around_the_step)
        }
        trajectories = run.run.trajectories(VALIDATED + 1).trajectories
        assert trajectories
        assert not any(one.facts["validate"] for one in trajectories)
        assert all(manifest.begin_ns <= one.begin_ns for one in trajectories)

    def test_what_is_asked_while_a_checkpoint_is_written_waits_too(self, run: Watched) -> None:
        """It saves within the step; the next one is captured, of the rank that it was aimed at."""
        manifest = run.requested("checkpoint", SAVED)
        assert (manifest.step, manifest.complete) == (SAVED + 1, True)
        assert "save_checkpoint" not in {span.name for span in manifest.stages}
        assert [(w.identity.role, w.identity.rank, w.status) for w in manifest.workers] == [
            ("actor", 1, "ok")
        ]
        [artifact] = manifest.workers[0].artifacts
        assert artifact.bytes > 10_000

    def test_a_rank_that_becomes_late_is_noticed_and_captured(self, run: Watched) -> None:
        """After two or three steps, with its peer, and the report begins with it."""
        captured = {step.step: step.captured for step in run.steps.values() if step.captured}
        step = max(captured)
        manifest = run.run.manifest(step)
        trigger = manifest.trigger
        noticed = trigger.noticed
        assert noticed in (FIRST_SLOW + 1, FIRST_SLOW + 2)
        assert captured.keys() - {5, 6, 9} <= {noticed + 1, noticed + 2}
        assert (trigger.kind, trigger.sign) == ("anomaly", "slow_stage")
        assert trigger.stage == "update_actor"
        assert [lane.partition("_fsdp")[0] for lane in trigger.suspects] == ["actor_rank1"]
        assert [lane.partition("_fsdp")[0] for lane in trigger.peers] == ["actor_rank0"]
        assert [(w.identity.role, w.identity.rank, w.status) for w in manifest.workers] == [
            ("actor", 0, "ok"),
            ("actor", 1, "ok"),
        ]
        assert {a.stage for worker in manifest.workers for a in worker.artifacts} == {
            "update_actor"
        }
        analysed = open_step(run.run.save_path / captured[step])
        [slow] = [row for row in analysed.report().stragglers if row.stage == "update_actor"]
        assert slow.slowest.startswith("actor_rank1")
        assert slow.fitted not in ("", NO_WORK)  # the data, the machine, or why neither is told
        suspects = analysed.to_frame("suspects")
        [row] = suspects[
            (suspects.kind == "stage") & (suspects.name == "update_actor")
        ].itertuples()
        assert row.suspect.startswith("actor_rank1")
        assert row.value - row.peer_value > 0.5 * SLOW_S
        assert rows_of(run.steps[noticed])["update_actor"].lead_ns > 0.9e9 * SLOW_S


class TestAsynchronous:
    """Generation goes on beside the steps of the trainer, which is what is summarized."""

    @pytest.fixture(scope="class", params=["one_step_off", "fully_async"])
    @classmethod
    def run(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Watched:
        return watched(
            tmp_path_factory.mktemp(request.param),
            {"checkpoint": {2: []}},
            "trainer.total_training_steps=8",
            *(["rollout.total_rollout_steps=64"] if request.param == "fully_async" else []),
            "trainer.save_freq=2",
            "trainer.logger=[console,file]",
            script=ROOT / "recipes/verl_async_cpu/run.sh",
            TRAINER=request.param,
        )

    def test_a_request_is_answered_with_the_policy_version(self, run: Watched) -> None:
        """The step behind the checkpoint is captured; it trains with what the step before left."""
        manifest = run.requested("checkpoint", 2)
        assert (manifest.step, manifest.complete, manifest.policy_version) == (3, True, 2)
        assert {worker.status for worker in manifest.workers} <= {"ok", "skipped"}

    def test_the_rows_of_each_step_add_up(self, run: Watched) -> None:
        """Of every version; generation has no row of its own, and does not hide the update."""
        assert sorted(run.steps) == list(range(1, 9))
        assert_adds_up(run.steps)
        for number in range(1, 9):
            rows = rows_of(run.steps[number])
            assert "rollout" not in rows
            assert (rows["update_actor"].role, rows["update_actor"].leader) == (
                "actor",
                "actor_rank0",
            )
            if number > 1:  # the first one waits for its whole batch
                assert rows["update_actor"].exposed_ns > 0.2 * 1e9 * run.steps[number].seconds
            assert run.steps[number].policy_version == number - 1
