"""What a whole run of real verl leaves when it is profiled, in both modes and with any engine."""

from __future__ import annotations

import json
from collections import Counter
from functools import reduce
from typing import Any

import pytest
from step_folders import spans_by_lane

from integrations.verl_runs import REFERENCE, Run, run_verl
from verl_profiling.cli import main
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.manifest import POLLING, StageSpan, added

PROMPTS, SAMPLES = 8, 2
TASK = "openai/gsm8k"
WEIGHTS_BYTES = 559_360
"""Of the tiny model that the recipe makes: 139,840 numbers of four bytes."""
WORKER_STAGES = {"old_log_prob", "ref_log_prob", "update_actor", "update_weights"}


def inside(spans: list[StageSpan], name: str, parent: str) -> int:
    """Return how many spans of a name lie inside one of another name, one level up."""
    parents = [span for span in spans if span.name == parent]
    return sum(
        any(
            p.begin_ns <= span.begin_ns and span.end_ns <= p.end_ns and span.depth == p.depth + 1
            for p in parents
        )
        for span in spans
        if span.name == name
    )


def assert_covered(
    spans: list[dict[str, Any]], name: str, outer: list[dict[str, Any]], around: str
) -> None:
    """Each span of a name that starts so lies inside one of the other lane's; there are some."""
    found = [span for span in spans if span["name"].startswith(name)]
    windows = [(span["ts"], span["ts"] + span["dur"]) for span in outer if span["name"] == around]
    assert found
    for span in found:
        assert any(
            begin <= span["ts"] and span["ts"] + span["dur"] <= end for begin, end in windows
        ), span


class RunContract:
    engine: str
    iteration: str
    limits: tuple[str, ...] = ()  # parts of the engine whose operations are known

    @pytest.fixture(scope="class")
    @classmethod
    def e2e(cls, tmp_path_factory: pytest.TempPathFactory) -> Run:
        """GRPO with a reference model, which shares the actor's process."""
        folder = tmp_path_factory.mktemp("e2e")
        trackers = "trainer.logger=[console,tensorboard]"
        return run_verl(
            folder,
            "profiling=e2e",
            "trainer.test_freq=3",
            trackers,
            *REFERENCE,
            ROLLOUT=cls.engine,
            TENSORBOARD_DIR=str(folder / "tensorboard"),
        )

    @pytest.fixture(scope="class")
    @classmethod
    def discrete(cls, tmp_path_factory: pytest.TempPathFactory) -> Run:
        """GRPO with a reference model, every stage recorded by itself."""
        return run_verl(
            tmp_path_factory.mktemp("discrete"),
            "profiling=discrete",
            *REFERENCE,
            ROLLOUT=cls.engine,
        )

    @pytest.fixture(params=["e2e", "discrete"])
    def run(self, request: pytest.FixtureRequest) -> Run:
        found: Run = request.getfixturevalue(request.param)
        return found

    def test_only_the_profiled_steps_have_folders(self, run: Run) -> None:
        """Complete ones, after a run that ends well and that says what it captures and where."""
        assert run.code == 0, run.output[-4000:]
        assert sorted(path.name for path in run.save_path.glob("step_*")) == [
            "step_000002",
            "step_000003",
        ]
        assert [run.manifest(step).complete for step in (2, 3)] == [True, True]
        assert {w.status for step in (2, 3) for w in run.manifest(step).workers} == {"ok"}
        [on] = [line for line in run.output.splitlines() if "profiling is on" in line]
        assert "steps 2, 3" in on
        assert str(run.save_path) in on
        assert run.output.index(on) < run.output.index("step:1 - ")
        for step in (2, 3):
            assert (
                run.output.count(f"step {step} captured in {run.save_path}/step_00000{step}") == 1
            )

    def test_e2e_has_one_artifact_per_worker(self, e2e: Run) -> None:
        """Training process, engine, agent loops and rewards each have one file
        of the whole step.
        """
        for step in (2, 3):
            paths = [a.path for w in e2e.manifest(step).workers for a in w.artifacts]
            assert paths == [
                "actor_rank0.torch.json.gz",
                "agent_loop_rank0.trajectories.jsonl.gz",
                "reward_rank0.trajectories.jsonl.gz",
                "rollout0_rank0.torch.json.gz",
            ]

    def test_discrete_has_one_artifact_per_stage(self, discrete: Run) -> None:
        """The training process has a trace of each stage, and the engine one of the rollout."""
        for step in (2, 3):
            stages = {a.stage for a in discrete.worker(step, "actor").artifacts}
            assert stages == WORKER_STAGES
            assert [a.stage for a in discrete.worker(step, "rollout").artifacts] == ["rollout"]

    def test_stages_of_the_controller_and_the_worker(self, e2e: Run) -> None:
        """Every part of GRPO on both sides, one inside of the other."""
        controller = {span.name: span for span in e2e.manifest(3).stages if not span.depth}
        assert controller.keys() == WORKER_STAGES | {"rollout", "advantage"}
        spans = e2e.worker(3, "actor").stages
        assert {span.name for span in spans if span.depth == 0} == WORKER_STAGES
        for span in spans:
            if span.depth == 0:
                outer = controller[span.name]
                assert outer.begin_ns <= span.begin_ns <= span.end_ns <= outer.end_ns
        spans = e2e.worker(3, "actor").stages
        batches, mini, micro = PROMPTS * SAMPLES, 4 * SAMPLES, 4
        assert inside(spans, "mini_batch", "update_actor") == batches // mini
        assert inside(spans, "micro_batch", "mini_batch") >= batches // micro
        assert inside(spans, "micro_batch", "old_log_prob") == batches // micro

    def test_the_stages_of_the_worker_have_the_work_of_their_batches(self, run: Run) -> None:
        """Samples, tokens within verl's lengths, and micro-batches; mini-batches add up."""
        spans = [span for span in run.worker(3, "actor").stages if span.work is not None]
        works = {span.name: span.work for span in spans if span.depth == 0}
        batches, micro = PROMPTS * SAMPLES, 4
        assert works.keys() == WORKER_STAGES - {"update_weights"}, spans
        for work in works.values():
            assert (work.samples, work.micro_batches) == (batches, batches // micro)
            assert work.samples < work.tokens <= 96 * work.samples
            assert work.tokens**2 <= work.samples * work.tokens_squared
        mini = [span.work for span in spans if span.name == "mini_batch"]
        assert sum(work.tokens for work in mini) == works["update_actor"].tokens
        assert works["old_log_prob"].lessons is None
        micro_batches = [span.work for span in spans if span.name == "micro_batch"]
        trained = [work.lessons for work in micro_batches if work.lessons is not None]
        assert reduce(added, trained) == works["update_actor"].lessons
        [(task, lessons)] = works["update_actor"].lessons.items()
        assert task == TASK
        assert lessons.keys() <= {"", "equal rewards"}
        assert sum(lessons.values()) == works["update_actor"].tokens

    def test_the_rollout_is_divided_by_what_the_trainer_does(self, run: Run) -> None:
        """Between the prompts and the last response it waits for the next look,
        and all but 1 % is named.
        """
        for step in (2, 3):
            spans = run.manifest(step).stages
            rollout = next(span for span in spans if span.name == "rollout")
            inside_it = [
                s
                for s in spans
                if s.depth == 1 and rollout.begin_ns <= s.begin_ns <= rollout.end_ns
            ]
            assert {s.name for s in inside_it} >= {"load_prompts", "dispatch_prompts", POLLING}
            named = sum(s.end_ns - s.begin_ns for s in inside_it)
            assert named == pytest.approx(rollout.end_ns - rollout.begin_ns, rel=0.01)

    def test_every_sample_is_a_trajectory_that_asked_the_engine_once(self, run: Run) -> None:
        """A single turn is one request with an id of its own;
        the reward is recorded on both sides.
        """
        for step in (2, 3):
            loops, rewards = (run.trajectories(step, role) for role in ("agent_loop", "reward"))
            assert len(loops.trajectories) == PROMPTS * SAMPLES
            assert {t.status for t in loops.trajectories} == {"done"}
            assert Counter(Counter(t.group for t in loops.trajectories).values()) == {
                SAMPLES: PROMPTS
            }
            asked = [span for span in loops.spans if span.name == "generate"]
            assert len({span.request for span in asked}) == PROMPTS * SAMPLES
            scored = {(span.facts["group"], span.facts["sample"]) for span in rewards.spans}
            assert scored == {(t.group, t.sample) for t in loops.trajectories}

    def test_requests_have_the_policy_version(self, run: Run) -> None:
        """Every sample is a request of the step, made with the weights of the step before."""
        for step in (2, 3):
            manifest = run.manifest(step)
            requests = run.worker(step, "rollout").requests
            assert len(requests) == PROMPTS * SAMPLES
            assert {request.policy_version for request in requests} == {step - 1}
            assert manifest.policy_version == step - 1
            assert manifest.metrics["policy_version/end"] == step
            rollout = next(span for span in manifest.stages if span.name == "rollout")
            assert all(
                rollout.begin_ns <= r.begin_ns <= r.end_ns <= rollout.end_ns for r in requests
            )

    def test_reports_are_in_verls_trackers(self, e2e: Run) -> None:
        """The numbers of each profiled step's report are in TensorBoard under that step,
        with verl's own.
        """
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(e2e.save_path.parent / "tensorboard"))
        events.Reload()
        steps = {point.step: point.value for point in events.Scalars("profiling/step_s")}
        assert steps.keys() == {2, 3}
        manifest = e2e.manifest(3)
        assert steps[3] == pytest.approx((manifest.end_ns - manifest.begin_ns) / 1e9, rel=0.01)
        assert {point.step for point in events.Scalars("timing_s/step")} == {1, 2, 3}

    def test_work_links_limits_and_lessons_are_in_report_top_and_trackers(
        self, e2e: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Work given, bytes of links and of weights, achieved operations, what taught nothing."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        assert main(["report", str(e2e.save_path / "step_000003"), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        [given] = [row for row in report["work"] if row["stage"] == "update_actor"]
        links = {row["name"]: row["bytes"] for row in report["links"]}
        assert links["weight bucket"] == WEIGHTS_BYTES
        assert links["all_gather"] > 0
        achieved = {row["stage"]: row["teraflops"] for row in report["achieved"]}
        assert achieved.keys() >= {"update_actor", "old_log_prob", *self.limits}
        assert report["rollout"]["rewarded"] == PROMPTS * SAMPLES
        assert {row["task"] for row in report["rollout"]["nothing"]} <= {TASK}
        assert {row["task"] for row in report["useless_training"]} <= {TASK}

        assert main(["top", str(e2e.save_path), "--once"]) == 0
        shown = capsys.readouterr().out
        assert f"update_actor {given['tokens']:,}" in shown
        [step] = [line for line in WatchLogReader(e2e.save_path).read() if line.step == 3]
        assert step.lessons["rollout"].keys() == step.lessons["update_actor"].keys() == {TASK}

        events = EventAccumulator(str(e2e.save_path.parent / "tensorboard"))
        events.Reload()

        def last(name: str) -> float:
            points: dict[int, float] = {p.step: p.value for p in events.Scalars(name)}
            return points[3]

        assert last("profiling/work/update_actor/tokens") == given["tokens"]
        assert last("profiling/watch/update_actor/tokens") == given["tokens"]
        assert last("profiling/links/weight_bucket/bytes") == WEIGHTS_BYTES
        assert last("profiling/achieved/update_actor/tflops") == pytest.approx(
            achieved["update_actor"], rel=1e-3
        )
        nothing = sum(row["share"] for row in report["rollout"]["nothing"])
        assert last("profiling/taught_nothing/rollout") == pytest.approx(nothing)
        for stage in ("rollout", "update_actor"):
            assert 0 <= last(f"profiling/watch/{stage}/taught_nothing") <= 1

    def test_one_timeline_shows_all(self, run: Run) -> None:
        """One file, one clock: what worker and engine did lies inside
        of the controller's stages for it.
        """
        folder = run.save_path
        for command in (
            ["merge", str(folder)],
            ["report", str(folder), "--save"],
            ["check", str(folder)],
        ):
            assert main(command) == 0
        for step in (2, 3):
            lanes = spans_by_lane(folder / f"step_{step:06d}" / "timeline.json.gz")
            controller = lanes["controller"]
            assert_covered(lanes["rollout0_rank0"], self.iteration, controller, "rollout")
            for name in WORKER_STAGES:
                assert_covered(lanes["actor_rank0"], name, controller, name)
            assert_covered(lanes["actor_rank0"], "mini_batch", controller, "update_actor")
