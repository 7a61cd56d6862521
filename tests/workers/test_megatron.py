"""The Megatron mixin and its timers, with real Megatron-core on CPU: TP=2, PP=2,
and its own schedule.
"""

from __future__ import annotations

import copy
import importlib.util
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from example_loops import request

from verl_profiling import CaptureStateError, stage
from verl_profiling.analysis import open_step
from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import CaptureResult, Manifest, StageSpan
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.trace import Trace
from verl_profiling.timeline.merge import merge
from verl_profiling.workers import CaptureMixin, CaptureTimers, MegatronCaptureMixin

ROOT = Path(__file__).resolve().parents[2]
SPANS = {"enable": True, "tool": "spans"}
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
needs_megatron = pytest.mark.skipif(
    not HAS_MEGATRON,
    reason="megatron-core is not installed; `make test-megatron` builds an environment",
)


def run_recipe(folder: Path, *overrides: str) -> Manifest:
    command = [
        sys.executable,
        "-m",
        "recipes.megatron_tiny.train",
        f"output_dir={folder}",
        "steps=2",
    ]
    done = subprocess.run(
        [*command, "profiling.schedule.steps=[2]", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return read_manifest(folder / "profiling" / "step_000002")


def counts(spans: Sequence[StageSpan]) -> dict[str, int]:
    return dict(Counter(span.name for span in spans))


def assert_inside(spans: Sequence[StageSpan], inner: str, outer: str) -> None:
    """Each span of one name lies inside a span of the other."""
    around = [span for span in spans if span.name == outer]
    for span in spans:
        if span.name == inner:
            assert any(o.begin_ns <= span.begin_ns and span.end_ns <= o.end_ns for o in around)


@pytest.mark.megatron
@needs_megatron
@pytest.mark.timeout(500)
def test_tensor_parallel_ranks(tmp_path: Path) -> None:
    """TP=2, e2e, the last tensor rank selected: its coordinates, file,
    micro-batches and timeline lane.
    """
    manifest = run_recipe(tmp_path, "parallel.tp=2", "parallel.pp=1", "profiling.select.tp=[-1]")
    worker = next(worker for worker in manifest.workers if worker.status == "ok")
    assert [other.identity.rank for other in manifest.workers if other.artifacts] == [1]
    assert worker.identity.topology == {"tp": 1, "pp": 0, "cp": 0, "ep": 0, "dp": 0}
    assert worker.identity.sizes == {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 1}
    assert [artifact.path for artifact in worker.artifacts] == ["actor_rank1_tp1.torch.json.gz"]
    assert counts(worker.stages) == {
        "old_log_prob": 1,
        "update_actor": 1,
        "forward-compute": 4,
        "backward-compute": 2,
    }
    assert_inside(worker.stages, "backward-compute", "update_actor")
    activations, losses = 4 * 4 * 16 * 64, 4 * 4 * 16  # bytes of a micro-batch, of two
    links = open_step(tmp_path / "profiling" / "step_000002").report().links
    # Four times forward: one for the embedding, two for each of two layers, three for the loss.
    # Twice backward: as many, but for the loss.
    assert [(row.calls, row.bytes) for row in links] == [
        (6 * (1 + 2 * 2), 6 * (1 + 2 * 2) * activations),
        (4 * 3, 4 * 3 * losses),
    ]
    assert {row.missing for row in links} == {"calls of all ranks"}
    [step] = find_steps(tmp_path / "profiling")
    [source] = step.sources
    assert (source.lane, source.rank) == ("actor_rank1_tp1", 1)
    timeline = merge(step)
    assert not timeline.problems
    events = [event for chunk in Trace(timeline.path).chunks() for event in chunk]
    assert any(event.name == "gloo:all_reduce" for event in events), (
        "the tensor-parallel collective"
    )
    assert any(b"tp1" in bytes(event.args) for event in events if event.name == "process_name")


@pytest.mark.megatron
@needs_megatron
@pytest.mark.timeout(500)
def test_pipeline_stages(tmp_path: Path) -> None:
    """PP=2, discrete, one rank of each pipeline stage: an artifact per stage and rank,
    and the waits.
    """
    manifest = run_recipe(
        tmp_path,
        "parallel.tp=1",
        "parallel.pp=2",
        "profiling=discrete",
        "profiling.select.ranks=one_per_pp_stage",
    )
    first, last = manifest.workers
    for pp, worker in enumerate((first, last)):
        assert (worker.status, worker.identity.topology["pp"]) == ("ok", pp)
        assert sorted(artifact.path for artifact in worker.artifacts) == [
            f"actor_rank{pp}_pp{pp}.old_log_prob.torch.json.gz",
            f"actor_rank{pp}_pp{pp}.update_actor.torch.json.gz",
        ]
    assert counts(first.stages) == {
        "old_log_prob": 1,
        "update_actor": 1,
        "forward-compute": 4,
        "forward-send": 4,
        "backward-recv": 2,
        "backward-compute": 2,
    }
    assert counts(last.stages) == {
        "old_log_prob": 1,
        "update_actor": 1,
        "forward-recv": 4,
        "forward-compute": 4,
        "backward-compute": 2,
        "backward-send": 2,
    }
    sent = [span for span in first.stages if span.name == "forward-send"]
    received = [span for span in last.stages if span.name == "forward-recv"]
    for send, receive in zip(sent, received, strict=True):
        assert receive.end_ns > send.begin_ns, "what is received was sent before"


class UsersTimers:
    """Timers of a training script. (Megatron's own synchronise with a GPU.)"""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, name: str, log_level: int | None = None) -> UsersTimers:
        self.name = name
        return self

    def start(self, barrier: bool = False) -> None:
        self.calls.append(f"start {self.name}")

    def stop(self, barrier: bool = False) -> None:
        self.calls.append(f"stop {self.name}")


def captured(tmp_path: Path, body: Callable[[], None], mode: str = "e2e") -> CaptureResult:
    worker = CaptureMixin()
    worker.init_capture({**SPANS, "mode": mode}, role="actor")
    worker.start_capture(request(tmp_path / "step"))
    try:
        body()
    finally:
        result = worker.stop_capture().result
    return result


@pytest.mark.megatron
@needs_megatron
def test_before_model_parallelism_is_initialised() -> None:
    with pytest.raises(CaptureStateError, match="initialize_model_parallel"):
        MegatronCaptureMixin().init_capture(SPANS, role="actor")


def test_timers_are_copied_and_sent_with_their_config() -> None:
    """Megatron makes deep copies of configs, and Ray sends them to other processes."""
    own = UsersTimers()
    for copied in (
        copy.deepcopy(CaptureTimers(own)),
        pickle.loads(pickle.dumps(CaptureTimers(own))),
    ):
        copied("forward-compute", log_level=2).start()
        assert copied.calls == ["start forward-compute"]
    assert own.calls == []


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_user_code_that_raises_inside_a_micro_batch(
    tmp_path: Path, session: Session, mode: str
) -> None:
    """Nobody stops the timer then; the stage around it ends all the same,
    and so does the next one.
    """
    timers = CaptureTimers()

    def update() -> None:
        with stage("update_actor"):
            timers("forward-compute", log_level=2).start()
            raise MemoryError

    def body() -> None:
        with pytest.raises(MemoryError):
            update()
        with stage("update_critic"):
            pass

    result = captured(tmp_path, body, mode)
    assert [(span.name, span.depth, span.failed) for span in result.stages] == [
        ("update_actor", 0, True),
        ("forward-compute", 1, True),
        ("update_critic", 0, False),
    ]
