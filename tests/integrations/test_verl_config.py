"""What a configuration of verl says about profiling, on the parts of one that matter here."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_profiling import ConfigError
from verl_profiling.integrations.verl.bridge import settings_from_verl, settings_of, why_nothing
from verl_profiling.integrations.verl.trainer import ProfilingTrainerMixin

TORCH = {
    "contents": [],
    "discrete": False,
    "profile_token_start": None,
    "profile_token_end": None,
    "schedule": {"skip_first": 0, "wait": 0, "warmup": 0, "active": 0, "repeat": 0},
}


def role(**given: Any) -> dict[str, Any]:
    """Return a role's profiler block; ``torch`` holds changes to the options of that tool."""
    torch = {**TORCH, **given.pop("torch", {})}
    return {
        "tool": "torch",
        "enable": False,
        "all_ranks": False,
        "ranks": [],
        "save_path": "out",
        "tool_config": {"torch": torch},
        **given,
    }


def verl_config(
    actor: dict[str, Any] | None = None,
    rollout: dict[str, Any] | None = None,
    ref: dict[str, Any] | None = None,
    critic: dict[str, Any] | None = None,
    engine: str = "vllm",
    profiling: Any = None,
    device: str = "cuda",
    **global_profiler: Any,
) -> DictConfig:
    """Return the parts of a verl configuration that profiling reads."""
    config = {
        "global_profiler": {
            "tool": "torch",
            "steps": None,
            "profile_continuous_steps": False,
            "save_path": "out",
            **global_profiler,
        },
        "actor_rollout_ref": {
            "actor": {"profiler": actor or role()},
            "ref": {"profiler": ref or role()},
            "rollout": {"profiler": rollout or role(), "name": engine, "engine_kwargs": {}},
        },
        "critic": {"profiler": critic or role()},
        "trainer": {"device": device},
    }
    if profiling is not None:
        config["profiling"] = profiling
    return OmegaConf.create(config)


def test_settings_are_read_from_profiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path holds in every process; without profiling, or with it off, there are none."""
    assert settings_of(verl_config()) is None
    assert settings_of(verl_config(profiling={"enable": False})) is None
    assert settings_of(verl_config(profiling="verl")) is None
    monkeypatch.chdir(tmp_path)
    settings = settings_of(
        verl_config(profiling={"enable": True, "mode": "discrete", "save_path": "here"})
    )
    assert settings is not None
    assert (settings.mode, settings.save_path) == ("discrete", str(tmp_path / "here"))


def test_the_sizes_of_policy_and_critic_are_those_of_their_folders(tmp_path: Path) -> None:
    """Unless the settings have them; adapters, and folders of other hosts, have none."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 64}')
    config = verl_config(profiling={"enable": True})
    config.actor_rollout_ref.model = {"path": str(tmp_path), "lora_rank": 0}
    config.critic.model = {"path": "hdfs://elsewhere/model"}
    settings = settings_of(config)
    assert settings is not None
    assert settings.model == {"model_type": "qwen2", "hidden_size": 64}
    assert not settings.roles
    config.actor_rollout_ref.model.lora_rank, config.critic.model.path = 8, str(tmp_path)
    settings = settings_of(config)
    assert settings is not None
    assert settings.model is None
    assert settings.roles["critic"].model == {"model_type": "qwen2", "hidden_size": 64}


@pytest.mark.parametrize(
    ("resume_mode", "run_id", "expected"),
    [
        ("auto", None, "gsm8k/7b"),
        ("disable", None, None),
        ("auto", "mine", "mine"),
    ],
)
def test_a_run_has_the_name_under_which_verl_resumes_it(
    resume_mode: str, run_id: str | None, expected: str | None
) -> None:
    """It keeps its name as it continues from its checkpoints, unless it has a name or none."""
    config = verl_config(profiling={"enable": True, "run_id": run_id})
    config.trainer = {"resume_mode": resume_mode, "project_name": "gsm8k", "experiment_name": "7b"}
    settings = settings_of(config)
    assert settings is not None
    assert settings.run_id == expected


def test_another_profiler_and_another_word_are_refused() -> None:
    """A profiler of verl's own is an error with both keys and what to do."""
    config = verl_config(profiling={"enable": True}, steps=[2, 3])
    with pytest.raises(
        ConfigError, match=r"global_profiler\.steps=\[2, 3\].*steps=null.*\+profiling=verl"
    ):
        settings_of(config)
    said = r"^profiling: is the text 'torch'.*\+profiling=e2e \(or default, discrete, off, verl\)"
    with pytest.raises(ConfigError, match=said):
        settings_of(verl_config(profiling="torch"))


class Trainer(ProfilingTrainerMixin):
    """A trainer of verl without anything to train."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def fit(self) -> str:
        """Train."""
        return "trained"


def test_a_missing_config_group_is_one_line_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Hydra makes a text of a group that it does not find; a queued job does not end for it."""
    assert Trainer(verl_config(profiling="e2e")).fit() == "trained"
    [line] = [record.getMessage() for record in caplog.records]
    assert "training goes on: profiling is the text 'e2e', as Hydra found no such" in line
    assert "hydra.searchpath=[pkg://verl_profiling.conf]" in line


def test_what_nobody_has_foreseen_does_not_end_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A configuration without verl's blocks is an error of the profiler, in one line."""
    config = verl_config(profiling={"enable": True})
    del config["actor_rollout_ref"]
    assert Trainer(config).fit() == "trained"
    [line] = [record.getMessage() for record in caplog.records]
    assert "training goes on: " in line
    assert "actor_rollout_ref" in line


def test_taking_over_switches_verls_profiler_off() -> None:
    """``profiling=verl`` uses verl's settings here, and leaves verl nothing to start."""
    config = verl_config(actor=role(enable=True), profiling="verl", steps=[2])
    settings = settings_of(config)
    assert settings is not None
    assert settings.schedule.steps == (2,)
    assert config.global_profiler.steps is None


def test_what_has_no_counterpart_is_said_once_for_a_trainer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However many of its classes have an ``__init__``, as verl's rollouter and its bases do."""

    class Base(ProfilingTrainerMixin):
        def __init__(self, config: Any) -> None:
            self.config = config

        def _process_single_sample_streaming(self) -> None:
            pass

    class Rollouter(Base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)

    with caplog.at_level(logging.WARNING):
        Rollouter(verl_config(profiling="verl", relocate_results=True))
    assert caplog.text.count("global_profiler.relocate_results") == 1
    assert caplog.text.count("nothing is profiled") == 1


def test_roles_and_ranks_are_bridged() -> None:
    """A role that verl profiles is profiled on the same ranks, rank 0 where none are named."""
    settings = settings_from_verl(
        verl_config(
            actor=role(enable=True, ranks=[0, 8], torch={"discrete": True}),
            rollout=role(enable=True),
            steps=[1, 2],
            profile_continuous_steps=True,
        )
    )
    actor, rollout = settings.for_role("actor"), settings.for_role("rollout")
    assert settings.enable
    assert settings.schedule.continuous
    assert (actor.mode, actor.ranks) == ("discrete", frozenset({0, 8}))
    assert (rollout.mode, rollout.ranks) == ("e2e", frozenset({0}))
    assert not settings.for_role("ref").enable
    all_ranks = settings_from_verl(verl_config(actor=role(enable=True, all_ranks=True), steps=[1]))
    assert all_ranks.for_role("actor").ranks is None


def test_contents_are_bridged() -> None:
    """They select the same things; an empty list means everything, as it does for verl."""
    everything = {"stack": True, "shapes": True, "memory": True}
    some = {"stack": True, "shapes": False, "memory": False, "activities": ["cpu"]}
    for contents, expected in (([], everything), (["cpu", "stack"], some)):
        config = verl_config(actor=role(enable=True, torch={"contents": contents}), steps=[1])
        assert settings_from_verl(config).roles["actor"].tools["torch"] == expected


def test_windows_are_bridged() -> None:
    """The mini-batch schedule and the "token" window, which counts engine iterations,
    keep their meaning.
    """
    schedule = {"skip_first": 1, "wait": 2, "warmup": 1, "active": 3, "repeat": 1}
    settings = settings_from_verl(
        verl_config(
            actor=role(enable=True, torch={"schedule": schedule}),
            rollout=role(enable=True, torch={"profile_token_start": 30, "profile_token_end": 60}),
            steps=[1],
        )
    )
    window = {"wait": 3, "warmup": 1, "active": 3}
    assert settings.roles["actor"].tools["torch"]["mini_batches"] == window
    assert (settings.rollout.start, settings.rollout.count) == (30, 30)


def test_finish_commands_become_hooks() -> None:
    """Of verl's training roles, on their ranks, in a shell and with verl's variables;
    one for equal ones.
    """
    command = 'upload "$VERL_PROFILE_SAVE_PATH" {a,b}'
    settings = settings_from_verl(
        verl_config(
            actor=role(enable=True, finish_hook_cmd=command, finish_hook_ranks=[0, 8]),
            ref=role(enable=True, finish_hook_cmd=command, finish_hook_ranks=[0, 8]),
            critic=role(enable=True, finish_hook_cmd="other", finish_hook_all_ranks=True),
            steps=[1],
        )
    )
    assert set(settings.after) == {"finish_hook_actor", "finish_hook_critic"}
    hook, other = settings.after["finish_hook_actor"], settings.after["finish_hook_critic"]
    told = {"RUN": "/run", "RANK": "8", "PID": "7", "ROLE": "ref"}
    shown = "echo " + " ".join(
        f"$VERL_PROFILE_{one}" for one in ("SAVE_PATH", "TOOL", "RANK", "PID", "ROLE")
    )
    printed = subprocess.run(
        [*hook.command[:2], hook.command[2].removesuffix(command) + shown],
        env={f"VERL_PROFILING_{name}": value for name, value in told.items()},
        check=True,
        capture_output=True,
        text=True,
    )
    assert printed.stdout == "/run torch 8 7 ref\n"
    assert hook.command[2].endswith(f"\n{command}")
    assert (hook.roles, hook.ranks, hook.when) == (("actor", "ref"), (0, 8), "last")
    assert (other.roles, other.ranks) == (("critic",), "all")


@pytest.mark.parametrize(
    ("engine", "options"),
    [("vllm", {"modules": True, "memory": True}), ("sglang", {"stack": True, "shapes": True})],
)
def test_engines_on_an_npu_record_with_its_tool(engine: str, options: dict[str, bool]) -> None:
    """What verl passes to engines there becomes the options that the engine has;
    its level is its own.
    """
    contents = ["npu", "cpu", "module", "shapes", "memory"]
    given = {"npu": {"contents": contents, "level": "level0", "analysis": True, "discrete": False}}
    rollout = role(enable=True, all_ranks=True, tool="npu", tool_config=given)
    config = verl_config(rollout=rollout, engine=engine, device="npu", tool="npu", steps=[2])
    settings = settings_from_verl(config)
    [tool] = settings.for_role("rollout").tools
    expected = {
        "level": "level1",
        "analysis": True,
        **dict.fromkeys(("stack", "shapes"), False),
        **options,
    }
    assert tool.name == "npu"
    assert {name: getattr(tool.options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("device", "tool", "right"), [("npu", "torch", "npu"), ("cuda", "npu", "torch")]
)
def test_the_tool_of_the_rollout_has_to_fit_the_device(device: str, tool: str, right: str) -> None:
    """A tool that would see nothing of the engines is refused before anything starts."""
    profiling = {"enable": True, "tool": "spans", "roles": {"rollout": {"tool": tool}}}
    with pytest.raises(
        ConfigError,
        match=(
            rf"^roles\.rollout\.tool: {tool} records nothing of vLLM on {device}; set "
            rf"tool {right}"
        ),
    ):
        settings_of(verl_config(device=device, profiling=profiling))


def test_what_servers_would_refuse_is_refused_before_they_start() -> None:
    """The key is named while the command is checked, not when all GPUs have been waited for."""
    config = verl_config(engine="sglang", profiling={"enable": True, "rollout": {"start": 3}})
    with pytest.raises(ConfigError, match=r"rollout\.start: SGLang counts iterations"):
        settings_of(config)
    config.profiling.roles = {"rollout": {"enable": False}}
    assert settings_of(config) is not None


@pytest.mark.parametrize(
    ("profiling", "steps", "says"),
    [
        (
            {"schedule": {"steps": [2]}, "mode": "e2e"},
            None,
            "has settings (schedule, mode) without enable",
        ),
        ("verl", None, "global_profiler.steps names no step"),
        ("verl", [2], "no role's profiler.enable is true"),
        ({"enable": False}, None, ""),
        ({}, None, ""),
    ],
)
def test_a_block_that_profiles_nothing_says_why(profiling: Any, steps: Any, says: str) -> None:
    """A recipe's own block that replaces the chosen group is loud;
    what is switched off is silent.
    """
    config = OmegaConf.create({"profiling": profiling, "global_profiler": {"steps": steps}})
    assert says in why_nothing(config)
    assert bool(says) == bool(why_nothing(config))


def test_each_role_may_name_its_tool() -> None:
    """As verl allows: then the common tool is not needed."""
    config = verl_config(actor=role(enable=True), steps=[1], tool=None)
    assert settings_from_verl(config).for_role("actor").tools[0].name == "torch"
