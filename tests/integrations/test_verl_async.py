"""verl's asynchronous trainers in real runs on CPU, one-step-off and fully asynchronous,
in both modes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from step_folders import spans_by_lane

from integrations.verl_runs import ROOT, Run, run_verl
from verl_profiling.cli import main
from verl_profiling.files.trajectory_log import read_log
from verl_profiling.manifest import Manifest, StageSpan

pytestmark = [pytest.mark.verl, pytest.mark.timeout(1200)]

SCRIPT = ROOT / "recipes/verl_async_cpu/run.sh"
PROMPTS, SAMPLES = 8, 2
BATCHES = 2
TIMERS = {
    "wait:rollout": "gen",
    "sync_rollout_weights": "sync_rollout_weights",
    "reward": "reward",
    "advantage": "adv",
    "update_actor": "update_actor",
}
MS = 1e-3


def ran(mode: str, trainer: str, factory: pytest.TempPathFactory, *overrides: str) -> Run:
    folder = factory.mktemp(f"{trainer}_{mode}")
    return run_verl(folder, f"profiling={mode}", *overrides, script=SCRIPT, TRAINER=trainer)


def of_name(spans: Iterable[StageSpan], name: str) -> list[StageSpan]:
    """Return the spans of a name, in order."""
    return [span for span in spans if span.name == name]


def seconds(spans: Iterable[StageSpan]) -> float:
    return sum(span.end_ns - span.begin_ns for span in spans) / 1e9


def assert_whole(run: Run) -> None:
    """The run ends well, its two folders are complete, and all that reads them is content."""
    assert run.code == 0, run.output[-4000:]
    assert sorted(path.name for path in run.save_path.glob("step_*")) == [
        "step_000002",
        "step_000003",
    ]
    for step in (2, 3):
        assert run.manifest(step).complete
        for worker in run.manifest(step).workers:
            if worker.name == "reward_rank0" and worker.status == "skipped":
                assert_nothing_to_score(run, step)
            else:
                assert worker.status == "ok", (worker.name, worker.status, worker.reason)
    folder = str(run.save_path)
    for command in (["merge", folder], ["report", folder, "--save"], ["check", folder]):
        assert main(command) == 0


def assert_nothing_to_score(run: Run, step: int) -> None:
    """On a busy machine, a step may take samples that were all scored before it began."""
    manifest = run.manifest(step)
    scored = [
        span
        for span in run.trajectories(step).spans
        if span.name == "reward" and manifest.begin_ns <= span.begin_ns <= manifest.end_ns
    ]
    assert not scored


def assert_beside(manifest: Manifest) -> None:
    """The rollout is outermost, and so is all beside it but the parts of a weight update;
    nothing is cut.
    """
    updates = of_name(manifest.stages, "update_weights")
    for span in manifest.stages:
        in_update = any(
            one.begin_ns <= span.begin_ns and span.end_ns <= one.end_ns for one in updates
        )
        assert span.depth == 0 or in_update, span.name
    assert not any(span.failed for span in manifest.stages)


class TestOneStepOff:
    """A step trains on the batch of the version before, while the next one is generated."""

    @pytest.fixture(scope="class", params=["e2e", "discrete"])
    @classmethod
    def run(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
        validation = ("trainer.test_freq=2", "data.val_max_samples=4")
        steps = "trainer.total_training_steps=4"  # the last one generates nothing
        return ran(request.param, "one_step_off", tmp_path_factory, steps, *validation)

    def test_it_is_captured_whole(self, run: Run) -> None:
        assert_whole(run)
        names = {worker.name for worker in run.manifest(3).workers}
        assert names == {"actor_rank0", "rollout0", "agent_loop_rank0", "reward_rank0"}

    def test_stages_take_as_long_as_verl_says(self, run: Run) -> None:
        """A stage lies inside verl's timer. A busy machine may stand still between their ends,
        so a stage may be shorter in one of the steps.
        """
        for stage, timer in TIMERS.items():
            longer = []
            for step in (2, 3):
                manifest = run.manifest(step)
                recorded = seconds(of_name(manifest.stages, stage))
                longer.append(manifest.metrics[f"timing_s/{timer}"] - recorded)
            assert -MS < min(longer) < MS, (stage, longer)
        for step in (2, 3):
            manifest = run.manifest(step)
            assert_beside(manifest)
            took = (manifest.end_ns - manifest.begin_ns) / 1e9
            waited = 10 * MS + sum(rpc.end_ns - rpc.begin_ns for rpc in manifest.rpcs) / 1e9
            assert 0 <= took - manifest.metrics["timing_s/step"] + MS <= waited
        assert not of_name(run.manifest(2).stages, "validate")
        assert of_name(run.manifest(2).around_the_step, "validate")

    def test_the_next_batch_is_generated_beside_the_update(self, run: Run) -> None:
        """It begins after the weights are handed over, and has a lane of its own."""
        for step in (2, 3):
            stages = run.manifest(step).stages
            (handed_over,), (update,) = (
                of_name(stages, "update_weights"),
                of_name(stages, "update_actor"),
            )
            assert handed_over.depth == 1
            rollout = of_name(stages, "rollout")[-1]
            assert handed_over.end_ns <= rollout.begin_ns <= update.begin_ns <= rollout.end_ns

    def test_versions(self, run: Run) -> None:
        """The batch's is that of the step before; the engines get the step's own at its begin."""
        for step in (2, 3):
            manifest = run.manifest(step)
            assert manifest.policy_version == manifest.metrics["policy_version/batch"] == step - 1
            assert manifest.metrics["policy_version/end"] == step
            rollout = run.worker(step, "rollout")
            assert {artifact.step for artifact in rollout.artifacts} == {step}
            assert {request.policy_version for request in rollout.requests} <= {step - 1, step}
        served = run.worker(2, "rollout").requests
        ended_ns = run.manifest(2).end_ns  # what follows is validation
        requests = [r for r in served if r.policy_version == 2 and r.begin_ns < ended_ns]
        assert len(requests) == PROMPTS * SAMPLES


class TestFullyAsync:
    """A step is a parameter version, made of two batches; samples come through a queue."""

    @pytest.fixture(scope="class", params=["e2e", "discrete"])
    @classmethod
    def run(cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
        return ran(request.param, "fully_async", tmp_path_factory)

    def test_it_is_captured_whole(self, run: Run) -> None:
        """Every process of the run has its artifacts, those of the rollouter's included."""
        assert_whole(run)
        names = {worker.name for worker in run.manifest(3).workers}
        assert names == {
            "actor_rank0",
            "rollout0",
            "agent_loop_rank0",
            "reward_rank0",
            "rollouter_rank0",
        }

    def test_a_step_is_a_parameter_version(self, run: Run) -> None:
        """It has all of its batches, ends with the hand-over, and generation goes on beside it."""
        for step in (2, 3):
            manifest = run.manifest(step)
            assert_beside(manifest)
            names = [span.name for span in manifest.stages]
            assert names.count("update_actor") == names.count("wait:rollout") == BATCHES
            assert names.count("update_weights") == names.count("rollout") == 1
            assert (manifest.policy_version, manifest.metrics["policy_version/end"]) == (
                step - 1,
                step,
            )
            assert manifest.metrics["fully_async/count/current_param_version"] == step - 1

    def test_stages_take_as_long_as_verl_says(self, run: Run) -> None:
        """To a millisecond a batch; verl counts the last batch of a version
        with the next version.
        """
        before, manifest = run.manifest(2), run.manifest(3)
        for stage in ("wait:rollout", "advantage", "update_actor"):
            last = of_name(before.stages, stage)[-1:]
            counted = [*last, *of_name(manifest.stages, stage)[:-1]]
            measured = manifest.metrics[f"timing_s/{TIMERS[stage]}"]
            assert seconds(counted) == pytest.approx(measured, abs=BATCHES * MS)

    def test_the_rollouter_is_a_lane(self, run: Run) -> None:
        """Its samples and pauses, and over time its queue and how many samples are stale."""
        for step in (2, 3):
            folder = run.save_path / f"step_{step:06d}"
            log = read_log(folder / "rollouter_rank0.trajectories.jsonl.gz")
            counted = {count.name for count in log.counts}
            assert counted >= {"samples in flight", "staleness samples"}
            assert {span.name for span in log.spans} >= {"reset_staleness"}
            assert {span.name for span in log.spans} <= {
                "sample",
                "pause",
                "reset_staleness",
                "validate",
            }
        main(["merge", str(run.save_path)])
        assert any(
            lane.startswith("rollouter_rank0")
            for lane in spans_by_lane(run.save_path / "step_000003" / "timeline.json.gz")
        )
