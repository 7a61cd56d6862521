"""TRL's own trainers, on a CPU, with the line that profiles them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from verl_profiling import CaptureStateError, ConfigError
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Manifest, StageSpan

pytest.importorskip("trl", reason="trl is not installed; `make test-trl` builds an environment")

from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from peft import LoraConfig
from transformers import Trainer
from trl import RLOOConfig, RLOOTrainer
from trl.extras.profiling import ProfilingContext

from recipes.trl_tiny.train import count_down, make_trainer
from verl_profiling.capture.session import Session
from verl_profiling.integrations.trl import TRLProfilingCallback

pytestmark = [pytest.mark.trl, pytest.mark.usefixtures("session"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
ROUND = ["rollout", "ref_log_prob", "reward", "advantage", "update_actor"]
WITHIN_S = 0.001


def settings(folder: Path, *overrides: str) -> DictConfig:
    """Return the recipe's settings, three steps of which the second is profiled."""
    with initialize_config_module("recipes.trl_tiny", version_base=None):
        return compose(
            "config",
            [
                f"output_dir={folder}",
                "grpo.max_steps=3",
                "profiling.schedule.steps=[2]",
                *overrides,
            ],
        )


def train(config: DictConfig, trainer: Trainer | None = None) -> None:
    trainer = trainer or make_trainer(config)
    trainer.add_callback(TRLProfilingCallback(trainer, config.profiling))
    trainer.train()


def manifest_of(folder: Path, step: int = 2) -> Manifest:
    """Return the manifest of a step of the run."""
    return read_manifest(folder / "profiling" / f"step_{step:06d}")


def names_of(spans: list[StageSpan]) -> list[str]:
    return [span.name for span in spans if not span.depth]


def seconds_of(spans: list[StageSpan], name: str) -> float:
    """Return how long a stage took, all of its runs together."""
    return sum(span.end_ns - span.begin_ns for span in spans if span.name == name) / 1e9


@pytest.fixture
def own_times(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], list[float]]:
    """What TRL itself measures, by step and name."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)

    def note(self: ProfilingContext, duration: float) -> None:
        times[(self.step or 0) + 1, self.name.partition(".")[2]].append(duration)

    monkeypatch.setattr(ProfilingContext, "_log_metrics", note)
    return times


@pytest.mark.parametrize(("mode", "artifacts"), [("e2e", 1), ("discrete", len(ROUND))])
def test_a_step_has_the_trainers_stages(
    tmp_path: Path, mode: str, artifacts: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In loop and worker, each recorded whole; the step is merged, reported and checked."""
    train(settings(tmp_path, f"profiling={mode}"))
    manifest = manifest_of(tmp_path)
    (worker,) = manifest.workers
    assert (worker.name, worker.status, len(worker.artifacts)) == ("actor_rank0", "ok", artifacts)
    assert names_of(manifest.stages) == names_of(worker.stages) == ROUND
    assert manifest.complete
    assert manifest.notes == []
    assert manifest.metrics["loss"] != 0
    assert manifest.metrics["reward"] > 0
    run = tmp_path / "profiling"
    assert [path.name for path in run.glob("step_*")] == ["step_000002"]
    assert main(["check", str(run)]) == 0
    assert main(["merge", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run / "step_000002"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in report["stages"]][: len(ROUND)] == ROUND


def test_stages_are_as_long_as_trl_says(
    tmp_path: Path, own_times: dict[tuple[int, str], list[float]]
) -> None:
    """Within a millisecond, where TRL times the same;
    what it times a part of is longer by what is around.
    """
    train(settings(tmp_path, "profiling.tool=spans"))
    manifest = manifest_of(tmp_path)
    stages = manifest.stages
    reference, *forward = own_times[2, "_get_per_token_logps_and_entropies"]
    assert len(forward) == 2, "one for each batch of the update"
    assert seconds_of(stages, "ref_log_prob") == pytest.approx(reference, abs=WITHIN_S)
    assert seconds_of(stages, "reward") == pytest.approx(
        sum(own_times[2, "_calculate_rewards"]), abs=WITHIN_S
    )
    assert sum(own_times[2, "transformers.generate"]) < seconds_of(stages, "rollout")
    assert sum(own_times[2, "compute_loss"]) < seconds_of(stages, "update_actor")
    whole = (manifest.end_ns - manifest.begin_ns) / 1e9
    assert 0 < whole - manifest.metrics["step_time"] < 0.05, (
        "TRL's step_time is without the optimizer"
    )


@pytest.mark.parametrize(
    ("steps_per_generation", "stages"),
    [
        (1, ["rollout", "ref_log_prob", "reward", "advantage", "update_actor"] * 2),
        (4, ["update_actor"]),
    ],
)
def test_a_step_is_an_update_however_often_is_generated(
    tmp_path: Path, steps_per_generation: int, stages: list[str]
) -> None:
    """Two rollouts in a step that generates for each batch; none in one that reuses another's."""
    train(
        settings(
            tmp_path, "profiling.tool=spans", f"+grpo.steps_per_generation={steps_per_generation}"
        )
    )
    assert names_of(manifest_of(tmp_path).stages) == stages


def test_the_reference_of_an_adapter_is_told_from_the_policy(tmp_path: Path) -> None:
    """PEFT computes both with one model, whose adapter is switched off for the reference."""
    config = settings(
        tmp_path,
        "profiling.tool=spans",
        "profiling.schedule.steps=[3]",
        "+grpo.steps_per_generation=4",
    )
    train(config, make_trainer(config, peft_config=LoraConfig(r=4, target_modules="all-linear")))
    stages = names_of(manifest_of(tmp_path, 3).stages)
    assert stages[:4] == ["rollout", "old_log_prob", "ref_log_prob", "reward"]


def test_validation_is_a_stage_of_its_own(tmp_path: Path) -> None:
    """Between the steps of one capture; what it generates is no rollout."""
    config = settings(
        tmp_path,
        "profiling.tool=spans",
        "profiling.schedule.steps=[2,3]",
        "profiling.schedule.continuous=true",
        "+grpo.eval_strategy=steps",
        "+grpo.eval_steps=1",
        "+grpo.per_device_eval_batch_size=8",
    )
    train(config)
    assert names_of(manifest_of(tmp_path).stages) == [*ROUND, "validate", *ROUND]


def test_rloo_has_the_same_stages(tmp_path: Path) -> None:
    config = settings(tmp_path, "profiling.tool=spans")
    grpo = make_trainer(config)
    arguments = dict(config.grpo) | {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    trainer = RLOOTrainer(
        model=str(tmp_path / "model"),
        processing_class=grpo.processing_class,
        reward_funcs=count_down,
        train_dataset=grpo.train_dataset,
        args=RLOOConfig(report_to=[], save_strategy="no", **arguments),
    )
    train(config, trainer)
    assert [
        name for name in names_of(manifest_of(tmp_path).stages) if name != "old_log_prob"
    ] == ROUND


def test_an_exception_is_the_users_and_costs_no_recording(tmp_path: Path) -> None:
    """A reward that raises ends the training as it does without profiling;
    the trainer can train again.
    """
    config = settings(tmp_path)
    trainer = make_trainer(config)
    steps = []

    def reward(**columns: Any) -> list[float]:
        steps.append(trainer.state.global_step + 1)
        if steps == [1, 2]:
            raise LookupError("no reward")
        return count_down(**columns)

    trainer.reward_funcs[0] = reward
    with pytest.raises(LookupError, match="no reward"):
        train(config, trainer)
    manifest = manifest_of(tmp_path)
    assert not manifest.complete
    assert [(span.name, span.failed) for span in manifest.stages if span.failed] == [
        ("reward", True)
    ]
    assert "LookupError: no reward" in " ".join(manifest.notes)
    assert [worker.status for worker in manifest.workers] == ["ok"]
    trainer.train()
    assert trainer.state.global_step == 3


def test_switched_off_the_trainer_is_as_it_was(tmp_path: Path, session: Session) -> None:
    """No method of it is replaced, and nothing is written."""
    config = settings(tmp_path, "profiling=off")
    trainer = make_trainer(config)
    before = set(vars(trainer))
    trainer.add_callback(TRLProfilingCallback(trainer, config.profiling))
    assert set(vars(trainer)) == before
    trainer.train()
    assert session.sink is None
    assert not (tmp_path / "profiling").exists()


def test_what_is_no_trainer_is_refused(tmp_path: Path) -> None:
    """As are wrong settings, and a second callback for one trainer; the trainer is left alone."""
    for wrong in (None, "grpo", count_down, Trainer):
        with pytest.raises(TypeError, match="a trainer of TRL is needed, not"):
            TRLProfilingCallback(wrong, {})
    config = settings(tmp_path)
    trainer = make_trainer(config)
    with pytest.raises(ConfigError, match="shedule"):
        TRLProfilingCallback(trainer, {"enable": True, "shedule": {}})
    TRLProfilingCallback(trainer, config.profiling)
    with pytest.raises(
        CaptureStateError, match="this GRPOTrainer has a TRLProfilingCallback already"
    ):
        TRLProfilingCallback(trainer, config.profiling)


def test_what_a_trainer_does_not_have_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer without rollouts is profiled as far as it goes,
    and one line says what is missing.
    """
    config = settings(tmp_path)
    trainer = Trainer(make_trainer(config).model)
    TRLProfilingCallback(trainer, config.profiling)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "transformers.trainer.Trainer has no _generate" in warning


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_every_process_is_a_rank(tmp_path: Path, mode: str) -> None:
    """Two under torchrun, as accelerate starts them: one manifest,
    and one artifact of each and stage.
    """
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
            ),
            *("-m", "recipes.trl_tiny.train", f"output_dir={tmp_path}", f"profiling={mode}"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (2, 3):
        manifest = manifest_of(tmp_path, step)
        assert [
            (worker.name, worker.status, len(worker.artifacts)) for worker in manifest.workers
        ] == [
            ("actor_rank0", "ok", 1 if mode == "e2e" else len(ROUND)),
            ("actor_rank1", "ok", 1 if mode == "e2e" else len(ROUND)),
        ]
        assert [names_of(worker.stages) for worker in manifest.workers] == [ROUND, ROUND]
        assert manifest.notes == []
    assert main(["check", str(tmp_path / "profiling")]) == 0
