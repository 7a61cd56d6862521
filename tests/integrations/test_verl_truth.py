"""Recorded stages take as long as verl says, to a millisecond, in the runs that people make."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from integrations.test_verl_agents import ADDED
from integrations.test_verl_agents import SCRIPT as AGENT_SCRIPT
from integrations.verl_runs import ASSETS, PLUGINS, REFERENCE, SCRIPT, Run, run_verl
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Manifest, StageSpan

pytestmark = [pytest.mark.truth, pytest.mark.timeout(1800)]

PREFIX = "timing_s/"
STAGES = {"adv": "advantage", "ref": "ref_log_prob", "testing": "validate", "gen": "rollout"}
CLOSE_S = 0.001


@dataclass(frozen=True)
class Compared:
    """A timer of verl's in one step: what verl measured,
    and how long its stages or the step took.
    """

    step: int
    timer: str
    theirs_s: float
    ours_s: float

    @property
    def difference_s(self) -> float:
        return self.ours_s - self.theirs_s


def compared(manifest: Manifest) -> Iterator[Compared]:
    """Yield every timer of verl's that is a stage, for each step of a capture."""
    for step in manifest.step_spans:
        metrics = step.metrics if len(manifest.steps) > 1 else manifest.metrics
        later = [other.begin_ns for other in manifest.step_spans if other.begin_ns > step.begin_ns]
        until_ns = min(later, default=None)
        spans = [
            span
            for span in (*manifest.stages, *manifest.around_the_step)
            if step.begin_ns <= span.begin_ns and (until_ns is None or span.begin_ns < until_ns)
        ]
        for name, value in metrics.items():
            timer = name.removeprefix(PREFIX)
            if timer == name or "/" in timer:
                continue
            if timer == "step":
                yield Compared(step.step, timer, value, (step.end_ns - step.begin_ns) / 1e9)
            elif durations := _durations(spans, STAGES.get(timer, timer)):
                yield Compared(step.step, timer, value, sum(durations))


def _durations(spans: Iterable[StageSpan], name: str) -> list[float]:
    """Return how long the stages of a name took, in seconds."""
    return [(span.end_ns - span.begin_ns) / 1e9 for span in spans if span.name == name]


CRITIC = (
    "algorithm.adv_estimator=gae",
    f"critic.model.path={ASSETS / 'model'}",
    "critic.strategy=fsdp2",
    "critic.ppo_mini_batch_size=4",
    "critic.ppo_micro_batch_size_per_gpu=4",
)
KL = (
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
)
VALIDATION = ("trainer.test_freq=1", "data.val_max_samples=4")
CHECKPOINTS = ("trainer.save_freq=1", "trainer.default_local_dir={folder}/checkpoints")
LORA = (
    *REFERENCE,
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.rollout.load_format=safetensors",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
)
TWO_REPLICAS = (
    "trainer.n_gpus_per_node=2",
    "ray_kwargs.ray_init.num_gpus=2",
    "ray_kwargs.ray_init.num_cpus=16",
)
BRIDGE = (
    "global_profiler.tool=torch",
    "global_profiler.steps=[2,3]",
    "actor_rollout_ref.actor.profiler.enable=true",
    "actor_rollout_ref.actor.profiler.all_ranks=true",
    "actor_rollout_ref.rollout.profiler.enable=true",
    *("--config-dir", "{folder}/config"),
)


@dataclass(frozen=True)
class Scenario:
    """A run and what it shall have recorded."""

    name: str
    overrides: tuple[str, ...]
    timers: tuple[str, ...] = ()
    steps: tuple[int, ...] = (2, 3)
    script: Path = SCRIPT
    plugins: str = PLUGINS
    again: tuple[str, ...] = ()
    save_path_key: str = "profiling.save_path"

    def run(self, folder: Path) -> Run:
        """Run it, and start it again where it is to be resumed."""
        _write_config(folder / "config")
        overrides = [text.format(folder=folder) for text in self.overrides]
        start = functools.partial(run_verl, script=self.script, save_path_key=self.save_path_key)
        run = start(folder, *overrides, PLUGINS=self.plugins)
        if self.again and run.code == 0:
            run = start(folder, *overrides, *self.again, PLUGINS=self.plugins)
        return run


def _write_config(folder: Path) -> None:
    """Write the recipe's configuration as it is with ``profiling=verl``:
    without settings of this package.
    """
    config = yaml.safe_load((SCRIPT.parent / "grpo_cpu.yaml").read_text())
    del config["profiling"]
    config["defaults"] = ["ppo_trainer", {"profiling": "verl"}, "_self_"]
    folder.mkdir()
    (folder / "grpo_cpu.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


SCENARIOS = (
    Scenario(
        "GAE with critic and KL, validation, checkpoints; resumed",
        ("profiling=e2e", *CRITIC, *KL, *VALIDATION, *CHECKPOINTS, "trainer.resume_mode=auto"),
        ("values", "update_critic", "ref", "testing", "save_checkpoint"),
        steps=(2, 3, 5),
        again=("trainer.total_training_steps=5", "profiling.schedule.steps=[5]"),
    ),
    Scenario(
        "GAE with critic and KL, V0, discrete",
        ("profiling=discrete", "trainer.use_v1=false", *CRITIC, *KL),
        ("values", "update_critic", "ref"),
    ),
    Scenario("LoRA with a reference pass, discrete", ("profiling=discrete", *LORA), ("ref",)),
    Scenario("verl's own settings (the bridge)", BRIDGE, save_path_key="global_profiler.save_path"),
    Scenario(
        "tool agent loop with two replicas, continuous steps, validation",
        ("profiling=e2e", "profiling.schedule.continuous=true", *VALIDATION, *TWO_REPLICAS),
        ("testing",),
        script=AGENT_SCRIPT,
        plugins=f"{PLUGINS},{ADDED}",
    ),
)
ALWAYS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_stages_take_as_long_as_verl_says(scenario: Scenario, tmp_path: Path) -> None:
    """Every timer of verl's is a stage that is as long; the rollout begins earlier,
    with the prompts.
    """
    run = scenario.run(tmp_path)
    assert run.code == 0, run.output[-4000:]
    found = [
        one
        for folder in sorted(run.save_path.glob("step_*"))
        for one in compared(read_manifest(folder))
    ]
    assert {one.step for one in found} == set(scenario.steps)
    assert {one.timer for one in found} >= {*ALWAYS, *scenario.timers}
    for one in found:
        if one.timer == "gen":
            assert one.difference_s > -CLOSE_S
        elif one.timer != "step":
            assert one.difference_s == pytest.approx(0, abs=CLOSE_S), one
