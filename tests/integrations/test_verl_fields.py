"""Every field of the profiler blocks in verl's real dataclasses and YAML is mapped, or reported."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from verl_profiling import ConfigError
from verl_profiling.integrations.verl.bridge import settings_from_verl

pytestmark = pytest.mark.verl

WORD = re.compile(r"\w+")
DOCS = Path(__file__).resolve().parents[2] / "docs/verl.md"
BLOCKS = {
    "global_profiler",
    "actor_rollout_ref.actor.profiler",
    "actor_rollout_ref.ref.profiler",
    "actor_rollout_ref.rollout.profiler",
    "critic.profiler",
}
# Another value than the one that the base below has; by the last part of the key.
OTHER = {
    "tool": "torch_memory",
    "enable": False,
    "all_ranks": True,
    "ranks": [3],
    "save_path": "elsewhere",
    "steps": [5],
    "profile_continuous_steps": True,
    "relocate_results": True,
    "finish_hook_cmd": "upload",
    "finish_hook_all_ranks": True,
    "finish_hook_ranks": [0],
    "contents": ["cpu", "stack"],
    "discrete": True,
    "level": "level1",
    "analysis": False,
    "profile_token_start": 4,
    "profile_token_end": 9,
    "skip_first": 1,
    "wait": 1,
    "warmup": 1,
    "active": 2,
    "repeat": 2,
    "trace_alloc_max_entries": 7,
    "stack_depth": 7,
    "memory_snapshot_num_steps": 2,
}
# A tool that a role does not use (``nsys``, ``precision_debugger`` are not of this bridge) and what
# is none of a profiler's settings.
LEFT_OUT = {"_target_", "name", "global_tool_config", "tool_config", "schedule"}


def composed() -> DictConfig:
    """Return verl's real configuration with every role profiled in one step."""
    roles = [f"{block}.enable=true" for block in BLOCKS if block != "global_profiler"]
    fixed = [
        "actor_rollout_ref.rollout.name=vllm",
        "global_profiler.steps=[1]",
        "global_profiler.tool=torch",
    ]
    fixed.append("actor_rollout_ref.actor.use_kl_loss=true")
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*fixed, *roles])
    OmegaConf.set_struct(config, False)
    return config


def dataclass_fields() -> dict[str, set[str]]:
    """Return the fields of verl's dataclasses, by the place in a role's block where they are."""
    from verl.utils.profiler import config

    places = {
        "": config.ProfilerConfig,
        "tool_config.torch": config.TorchProfilerToolConfig,
        "tool_config.torch.schedule": config.TorchProfilerScheduleConfig,
        "tool_config.torch_memory": config.TorchMemoryToolConfig,
        "tool_config.npu": config.NPUToolConfig,
    }
    return {
        place: {field.name for field in dataclasses.fields(kind)} for place, kind in places.items()
    }


def outcome(
    config: DictConfig, caplog: pytest.LogCaptureFixture, key: str, value: object
) -> tuple[bool, str]:
    """Change one field; return whether that changes the settings, and the bridge's notes."""
    changed = config.copy()
    block, _, rest = key.partition(".tool_config.")
    if rest:
        OmegaConf.update(changed, f"{block}.tool", rest.partition(".")[0])
    if ".schedule." in key:
        OmegaConf.update(changed, key.rpartition(".")[0] + ".active", 1)
    if key.rpartition(".")[2] in ("finish_hook_all_ranks", "finish_hook_ranks"):
        OmegaConf.update(changed, "global_profiler.finish_hook_cmd", "upload")
    before = settings_from_verl(changed).to_dict()
    OmegaConf.update(changed, key, value)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        try:
            return settings_from_verl(changed).to_dict() != before, caplog.text
        except ConfigError as error:
            return False, str(error)


def is_named(key: str, text: str) -> bool:
    """Return whether a text names a field, the part of the block that it is in,
    or the tool left out.
    """
    block, _, rest = key.partition(".tool_config.")
    left_out = bool(rest) and f"{block}.tool=" in text
    return key in text or f"{key.rpartition('.')[0]}:" in text or left_out


def test_every_field_is_mapped_or_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Changing any field of a block changes the settings, or is answered with its key."""
    config = composed()
    keys = {f"global_profiler.{name}" for name in set(config.global_profiler) - LEFT_OUT}
    for role in BLOCKS - {"global_profiler"}:
        for place, names in dataclass_fields().items():
            block = f"{role}.{place}" if place else role
            in_yaml = OmegaConf.select(config, block)
            keys |= {f"{block}.{name}" for name in (names | set(in_yaml or ())) - LEFT_OUT}
    assert {key for key in keys if key.rpartition(".")[2] not in OTHER} == set()
    silent = []
    for key in sorted(keys):
        changed, said = outcome(config, caplog, key, OTHER[key.rpartition(".")[2]])
        if not changed and not is_named(key, said):
            silent.append(key)
    assert silent == []


def test_the_table_in_the_documentation_names_every_field() -> None:
    table = {
        word
        for line in DOCS.read_text().splitlines()
        if line[:1] == "|"
        for word in WORD.findall(line)
    }
    fields = set().union(*dataclass_fields().values()) | set(composed().global_profiler)
    assert [
        name for name in sorted(fields - {"_target_", "name", "tool_config"}) if name not in table
    ] == []


def test_roles_that_a_run_does_not_have_are_no_settings(caplog: pytest.LogCaptureFixture) -> None:
    """Without a critic and a reference model, their blocks are not read:
    nobody would have those roles.
    """
    config = composed()
    assert {"critic", "ref"} <= settings_from_verl(config).roles.keys()
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.actor.use_kl_loss = False
    assert settings_from_verl(config).roles.keys() == {"actor", "rollout"}


@pytest.mark.parametrize("searchpath", [[], ["hydra.searchpath=[pkg://verl_profiling.conf]"]])
def test_the_bridge_is_asked_for_with_and_without_the_searchpath(searchpath: list[str]) -> None:
    """``+profiling=verl`` is a value, or the group of that name where there are groups."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*searchpath, "+profiling=verl"])
    assert config.profiling == "verl"
