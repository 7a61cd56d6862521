"""The recipe, run as a user runs it: what it learns, and what its captures hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip(
    "transformers", reason="transformers is not installed; `make env` builds an environment"
)

from reader import TRAIN, Reader
from step_folders import read_events, spans_by_lane

from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.integrations.tiny_grpo import RESPONSE_LENGTH

ACTORS = ("actor_rank0", "actor_rank1")
REPLICAS = ("rollout0_rank0", "rollout1_rank0")
REQUESTS = ("rollout0", "rollout1")
ACTOR_STAGES = {"old_log_prob", "update_actor", "update_weights"}
SLACK_US = 100.0  # two processes read the clock on either side of a call


@dataclass(frozen=True)
class Run:
    folder: Path
    mode: str
    engine: str
    scheduled: tuple[int, int]

    @property
    def profiling(self) -> Path:
        return self.folder / "profiling"

    @property
    def steps(self) -> list[Path]:
        return [self.profiling / f"step_{step:06d}" for step in self.scheduled]

    @property
    def rewards(self) -> list[float]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["reward"] for line in lines]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("e2e", "transformers"), id="e2e"),
        pytest.param(("discrete", "transformers"), id="discrete"),
        pytest.param(("e2e", "vllm"), id="e2e-vllm", marks=pytest.mark.vllm),
        pytest.param(("e2e", "sglang"), id="e2e-sglang", marks=pytest.mark.sglang),
    ],
)
def run(request: pytest.FixtureRequest, reader: Reader) -> Run:
    """A whole run with two steps captured, and its timelines."""
    mode, engine = request.param
    folder = reader.output_of(mode, engine)
    assert main(["merge", str(folder / "profiling")]) == 0
    return Run(folder, mode, engine, (2, 3) if mode == "e2e" else (10, 20))


pytestmark = [pytest.mark.recipes, pytest.mark.timeout(600)]


def expected_artifacts(run: Run) -> set[str]:
    """Return the names of the artifacts that a step folder must hold."""
    if run.mode == "e2e":
        return {f"{lane}.torch.json.gz" for lane in (*ACTORS, *REPLICAS)}
    stages = [(lane, stage) for lane in ACTORS for stage in ACTOR_STAGES]
    stages += [(lane, "rollout") for lane in REPLICAS]
    return {f"{lane}.{stage}.torch.json.gz" for lane, stage in stages}


def test_it_learns(run: Run) -> None:
    """Training raises the reward from near nothing to most of what there is,
    while being profiled.
    """
    if len(run.rewards) < 40:
        pytest.skip(f"{len(run.rewards)} steps are too few to learn; the run in e2e mode has 40")
    assert sum(run.rewards[:3]) / 3 < 0.2
    assert sum(run.rewards[-5:]) / 5 > 0.7


def test_every_artifact_is_there(run: Run) -> None:
    """The manifest names one artifact per worker (and stage), each exists,
    and `check` finds no fault.
    """
    for folder in run.steps:
        manifest = read_manifest(folder)
        named = {artifact.path for worker in manifest.workers for artifact in worker.artifacts}
        assert manifest.complete
        assert named == expected_artifacts(run)
        assert all((folder / name).stat().st_size > 0 for name in named)
    assert main(["check", str(run.profiling)]) == 0


def test_artifacts_hold_their_stages(run: Run) -> None:
    """Each training rank's trace has its stages as spans: all in e2e, its own in discrete."""
    for folder in run.steps:
        for worker in read_manifest(folder).workers:
            if worker.identity.role != "actor":
                continue
            for artifact in worker.artifacts:
                names = {event["name"] for event in read_events(folder / artifact.path)}
                stages = ACTOR_STAGES if run.mode == "e2e" else {artifact.stage}
                assert stages <= names
                assert ("mini_batch" in names) == ("update_actor" in stages)


def test_the_timeline_has_every_worker(run: Run) -> None:
    """The controller, both ranks, both replicas and their requests have spans
    in the merged timeline.
    """
    expected = {"controller", *ACTORS, *REPLICAS, *REQUESTS}
    for folder in run.steps:
        assert set(spans_by_lane(folder / "timeline.json.gz")) == expected


def test_effects_lie_inside_their_causes(run: Run) -> None:
    """In the timeline, a worker's stage lies inside the controller's stage of the same name."""
    for folder in run.steps:
        lanes = spans_by_lane(folder / "timeline.json.gz")
        causes = {
            span["name"]: span for span in lanes.pop("controller") if span.get("cat") == "stage"
        }
        for lane, spans in lanes.items():
            effects = [
                span for span in spans if span.get("cat") == "stage" and span["name"] in causes
            ]
            assert {span["name"] for span in effects} >= (ACTOR_STAGES if lane in ACTORS else set())
            for effect in effects:
                cause = causes[effect["name"]]
                assert cause["ts"] - SLACK_US <= effect["ts"], (lane, effect, cause)
                end = effect["ts"] + effect["dur"]
                assert end <= cause["ts"] + cause["dur"] + SLACK_US, (lane, effect, cause)


def test_rollout_requests_are_counted(run: Run) -> None:
    """Each of the step's 256 responses is in the manifest, with its length."""
    for folder in run.steps:
        requests = [
            request for worker in read_manifest(folder).workers for request in worker.requests
        ]
        assert len(requests) == 256
        assert all(0 <= request.response_tokens <= RESPONSE_LENGTH for request in requests)


def test_without_profiling_nothing_is_written(reader: Reader) -> None:
    written = reader.written_by(TRAIN)
    assert "metrics.jsonl" in {path.name for path in written}
    assert [path for path in written if "profiling" in path.parts] == []
