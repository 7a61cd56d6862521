"""Builds the profiling settings from a configuration of verl.

``profiling`` holds settings of this package, or with ``+profiling=verl`` the text ``verl``. Then
the settings are made from the ``global_profiler`` and ``profiler`` blocks of verl's own profiler.
The table in docs/verl.md maps their fields to settings.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_profiling.capture_request import Ranks
from verl_profiling.engines import ENGINES, adapter_named
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.integrations.verl import RECORDS
from verl_profiling.settings.config import EVERY_RANK, ProfilingConfig
from verl_profiling.settings.roles import RoleOverride, model_sizes
from verl_profiling.settings.schedule import Schedule, planned_captures
from verl_profiling.units import step_list
from verl_profiling.workers.nsys_launch import expected_ranges

logger = logging.getLogger(__name__)

_CRITIC = "critic"
TRAINING_ROLES = ("actor", "ref", _CRITIC)
_GROUPS = ("default", "discrete", "off", "verl")  # further options of +profiling, besides e2e
_ENGINES = [engine for engine in ENGINES if engine in {part for _, part in RECORDS}]
"""Engines whose servers are hooked."""
_SWITCHED_OFF = "set profiling.roles.rollout.enable=false"
_EVERYWHERE = (*TRAINING_ROLES, ROLLOUT_ROLE)
_BLOCKS = {role: f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", ROLLOUT_ROLE)}
_BLOCKS["critic"] = "critic.profiler"
_MOST_NAMED = 10  # steps in a log line
_TOOLS = ("torch", "torch_memory", "npu", "nsys")
_REPLICA_SIZES = (
    "tensor_model_parallel_size",
    "data_parallel_size",
    "pipeline_model_parallel_size",
)

_CONTENTS = ("stack", "shapes", "memory")  # entries of verl's contents that are options here, too
_DEVICES = {"torch": "cuda", "npu": "npu"}
"""The entry of ``contents`` that selects the events of the device, by tool."""
_ALWAYS = "has no effect: every artifact is in the folder of its step anyway"
_WITHOUT_COUNTERPART = (
    # Fields of a profiler block (* is the block's tool); roles with the block; reason for the user.
    (("relocate_results",), _EVERYWHERE, _ALWAYS),
    (("save_path",), _EVERYWHERE, "all roles write to global_profiler.save_path"),
    (
        ("finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks"),
        (ROLLOUT_ROLE,),
        "rollout servers run no such command, with verl's own profiler neither",
    ),
    (
        ("tool_config.*.profile_token_start", "tool_config.*.profile_token_end"),
        TRAINING_ROLES,
        "a window of engine iterations is for the rollout only",
    ),
    (("tool_config.torch.schedule.active",), (ROLLOUT_ROLE,), "engines have no mini-batches"),
    (
        ("tool_config.torch.schedule.repeat",),
        TRAINING_ROLES,
        "one window of mini-batches is recorded",
    ),
    (("tool_config.torch_memory.stack_depth",), _EVERYWHERE, "torch keeps whole stacks"),
)
# verl's own defaults of such fields, which are no choice of the user.
_DEFAULTS = {"tool_config.torch.schedule.repeat": 1, "tool_config.torch_memory.stack_depth": 32}
_FINISH_ENVIRONMENT = 'VERL_PROFILE_SAVE_PATH="$VERL_PROFILING_RUN" ' + " ".join(
    f'VERL_PROFILE_{name}="$VERL_PROFILING_{name}"' for name in ("RANK", "PID", "ROLE")
)


def settings_of(config: Any) -> ProfilingConfig | None:
    """Return the settings in a verl configuration, or ``None`` if nothing is to be profiled.

    With ``profiling=verl``, verl's own profiler is switched off in ``config``, because this package
    replaces it.

    Raises:
        ConfigError: The settings are wrong, or verl's own profiler is switched on as well.
    """
    given = config.get("profiling")
    if given is None:
        return None
    steps = config.global_profiler.get("steps")
    if problem := without_group(config):
        raise ConfigError("profiling", problem)
    if isinstance(given, str):
        settings = settings_from_verl(config)
        config.global_profiler.steps = None
    else:
        settings = ProfilingConfig.from_any(given)
        if settings.enable and steps:
            raise ConfigError(
                "profiling",
                f"verl's own profiler is switched on too (global_profiler.steps={list(steps)}), "
                "and two profilers in one process destroy each other's recordings; set "
                "global_profiler.steps=null, or +profiling=verl to have its settings used here",
            )
    if not settings.enable:
        return None
    _check_rollout(config, settings)
    _check_nsys(config, settings)
    return dataclasses.replace(
        _with_models(settings, config),
        save_path=settings.save_path if settings.is_remote else str(settings.local_folder),
        run_id=settings.run_id or _run_id(config.get("trainer") or {}),
    )


def _with_models(settings: ProfilingConfig, config: Any) -> ProfilingConfig:
    """Return the settings with the sizes of policy and critic, where this host has their files.

    A model with LoRA adapters is left out: its backward pass is shorter.
    """
    policy = (config.get("actor_rollout_ref") or {}).get("model") or {}
    critic = (config.get("critic") or {}).get("model") or {}
    if settings.model is None:
        settings = dataclasses.replace(settings, model=_sizes(policy))
    override = settings.roles.get(_CRITIC, RoleOverride())
    if override.model is None and (sizes := _sizes(critic)):
        roles = {**settings.roles, _CRITIC: dataclasses.replace(override, model=sizes)}
        settings = dataclasses.replace(settings, roles=roles)
    return settings


def _sizes(model: Mapping[str, Any]) -> dict[str, Any] | None:
    if model.get("path") and not model.get("lora_rank"):
        with suppress(ConfigError):  # e.g. hdfs://...
            return model_sizes(str(model["path"]), "model")
    return None


def without_group(config: Any) -> str:
    """Return why ``profiling`` holds no settings if Hydra has not found its config group."""
    given = config.get("profiling")
    if not isinstance(given, str) or given == "verl":
        return ""
    return (
        f"is the text {given!r}, as Hydra found no such config group; write "
        f"+profiling=e2e (or {', '.join(_GROUPS)}), with verl_profiling installed where "
        "the command runs, or with 'hydra.searchpath=[pkg://verl_profiling.conf]'"
    )


def settings_without_checks(config: Any) -> ProfilingConfig | None:
    """Return the settings in a verl configuration without checks, changes and log lines.

    Raises:
        ConfigError: The settings are wrong.
    """
    given = config.get("profiling")
    if given == "verl":
        given = _bridged(config, [])
    return None if isinstance(given, str | None) else ProfilingConfig.from_any(given)


def settings_from_verl(config: Any) -> ProfilingConfig:
    """Return the settings made from the profiler blocks of a verl configuration.

    Each field without a counterpart gets a warning.

    Args:
        config: A whole verl configuration (of ``main_ppo``), as ``DictConfig``.

    Raises:
        ConfigError: A required field, e.g. the tool, has a value without a counterpart.
    """
    notes: list[str] = []
    settings = ProfilingConfig.from_any(_bridged(config, notes))
    for note in notes:
        logger.warning("%s", note)
    return settings


def why_nothing(config: Any) -> str:
    """Return why a configuration with ``profiling`` profiles nothing; empty if profiling is off on
    purpose.

    Args:
        config: A whole verl configuration that yields no settings.
    """
    given = config.get("profiling")
    if isinstance(given, Mapping) and given and "enable" not in given:
        return (
            f"profiling has settings ({', '.join(map(str, given))}) without enable; if a config "
            "group was chosen (profiling=verl), this block replaced it. Set "
            "profiling.enable=true, or remove the block where it is defined"
        )
    if given == "verl":
        named = config.global_profiler.get("steps")
        why = (
            "no role's profiler.enable is true" if named else "global_profiler.steps names no step"
        )
        return f"profiling=verl takes the settings of verl's own profiler, and {why}"
    return ""


def captured_steps(schedule: Schedule, last_step: int | None) -> str:
    """Return the steps to capture as text, e.g. ``steps 2, 3``, or ``no step (schedule.every=10)``.

    Args:
        schedule: The schedule.
        last_step: Number of the run's last step, if it is known.
    """
    captures, _, more = planned_captures(schedule, last_step)
    steps = [step for first, last in captures for step in range(first, last + 1)]
    if not steps:
        return f"no step ({schedule.in_words()})"
    return step_list(steps[:_MOST_NAMED]) + " and more" * (more or len(steps) > _MOST_NAMED)


def _check_nsys(config: Any, settings: ProfilingConfig) -> None:
    """Check each role that records with Nsight Systems.

    Raises:
        ConfigError: The number of ranges is unknown, or verl cannot start the role under Nsight
            Systems.
    """
    for role in _EVERYWHERE:
        chosen = settings.for_role(role)
        if not chosen.enable or chosen.launched_tool is None:
            continue
        if (device := _device(config)) != "cuda":
            why = f"nsys records CUDA devices, and trainer.device is {device!r}"
            raise ConfigError(f"roles.{role}.tool", why)
        expected_ranges(chosen, settings.schedule)


def _check_rollout(config: Any, settings: ProfilingConfig) -> None:
    """Refuse engines, tools and windows that rollout servers would refuse at their start.

    Raises:
        ConfigError: There is no adapter for the engine, or the engine does not support the
            settings.
    """
    chosen = settings.for_role(ROLLOUT_ROLE)
    if not chosen.enable:
        return
    rollout = config.actor_rollout_ref.rollout
    device = _device(config)
    if rollout.name not in _ENGINES:
        why = f"{rollout.name} cannot be captured ({choices_hint(rollout.name, _ENGINES)})"
        raise ConfigError("actor_rollout_ref.rollout", f"{why}; {_SWITCHED_OFF}")
    if (rollout.get("disaggregation") or {}).get("enabled"):
        why = "replicas that are split into prefill and decode servers cannot be captured"
        raise ConfigError("actor_rollout_ref.rollout", f"{why}; {_SWITCHED_OFF}")
    adapter = adapter_named(rollout.name)
    tool = adapter.tool_of(chosen)
    if tool is None:
        return
    adapter.check_device(tool, device, ROLLOUT_ROLE)
    given = (rollout.get("engine_kwargs") or {}).get(rollout.name) or {}
    arguments = {"dp_size": rollout.get("data_parallel_size"), "device": device, **given}
    adapter.check(tool, settings.rollout, ROLLOUT_ROLE, arguments)


def _device(config: Any) -> str:
    """Return the kind of device that verl computes on."""
    return str((config.get("trainer") or {}).get("device") or "cuda")


def _run_id(trainer: Mapping[str, Any]) -> str | None:
    """Return ``project/experiment``, the name of verl's checkpoints;
    ``None`` if verl does not resume.
    """
    if trainer.get("resume_mode", "disable") == "disable":
        return None
    return f"{trainer['project_name']}/{trainer['experiment_name']}"


def _bridged(config: Any, notes: list[str]) -> dict[str, Any]:
    """Return the settings of verl's own profiler as a dict for :meth:`ProfilingConfig.from_any`.

    Args:
        config: A whole verl configuration.
        notes: List that gets a sentence for each field without a counterpart.
    """
    from omegaconf import OmegaConf

    common = OmegaConf.to_container(config.global_profiler, resolve=True)
    blocks: dict[str, dict[str, Any]] = {}
    for role, path in _BLOCKS.items():
        given = OmegaConf.select(config, path)
        if given is not None and plays(config, role):
            blocks[role] = OmegaConf.to_container(given, resolve=True)
    if common.get("relocate_results"):
        notes.append(f"global_profiler.relocate_results: {_ALWAYS}")
    settings = {
        "enable": False,
        "save_path": common["save_path"],
        "roles": {
            role: _role(config, role, block, common, notes) for role, block in blocks.items()
        },
        "rollout": _window(blocks.get(ROLLOUT_ROLE, {})),
        "after": _finish_commands(blocks),
    }
    if steps := list(common.get("steps") or ()):
        settings["enable"] = any(block.get("enable") for block in blocks.values())
        settings["tool"] = _tool("global_profiler.tool", common.get("tool") or "torch")
        continuous = bool(common["profile_continuous_steps"])
        settings["schedule"] = {"steps": steps, "continuous": continuous}
    return settings


def _window(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window of engine iterations, which verl calls response tokens."""
    window = (rollout.get("tool_config") or {}).get(rollout.get("tool")) or {}
    start = window.get("profile_token_start") or 0
    end = window.get("profile_token_end")
    return {"start": start, "count": None if end is None else end - start, "max_window_s": None}


def _role(
    config: Any, role: str, block: Mapping[str, Any], common: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    """Return the settings of a role, made from its ``profiler`` block in verl's configuration.

    Args:
        config: The whole verl configuration.
        role: The role.
        block: The role's ``profiler`` block.
        common: The block ``global_profiler``.
        notes: List that gets a sentence for each field without a counterpart.
    """
    if not block.get("enable"):
        return {"enable": False}
    where, rollout = _BLOCKS[role], config.actor_rollout_ref.rollout
    is_rollout = role == ROLLOUT_ROLE
    tool = _tool(f"{where}.tool", block.get("tool"))
    parents = [common]
    if is_rollout:  # verl copies the actor's finish hook into the rollout's block
        parents.append(config.actor_rollout_ref.actor.get("profiler"))
    notes += _notes_on_unused(role, tool, block, parents)
    of_engines = "npu" if _device(config) == "npu" else "torch"
    if is_rollout and tool != of_engines:
        notes.append(
            f"{where}.tool={tool}: rollout engines record only with {of_engines}, so the "
            "rollout is not"
        )
        return {"enable": False}
    given = (block.get("tool_config") or {}).get(tool) or {}
    options = _options(tool, given)
    if is_rollout:
        if options.get("activities"):
            notes.append(f"{where}.tool_config.{tool}.contents: engines record all activities")
        options = _engine_options(options, given, tool, rollout.name)
    elif tool == "torch_memory":
        options["oom_folder"] = str(Path(common["save_path"], "oom").absolute())
    settings: dict[str, Any] = {
        "tool": tool,
        "mode": "discrete" if given.get("discrete") else "e2e",
        "tools": {tool: options},
    }
    if not block.get("all_ranks"):
        settings["ranks"] = list(block.get("ranks") or _default_ranks(role, rollout))
    return settings


def _default_ranks(role: str, rollout: Any) -> range:
    """Return verl's default: rank 0 of a role, and all ranks of the first rollout replica."""
    sizes = _REPLICA_SIZES if role == ROLLOUT_ROLE else ()
    return range(math.prod(rollout.get(size) or 1 for size in sizes))


def _notes_on_unused(
    role: str, tool: str, block: Mapping[str, Any], parents: list[Any]
) -> Iterator[str]:
    """Yield a sentence for each field that a role's block sets, and that no setting matches.

    Args:
        role: The role.
        tool: The role's tool; verl ignores the options of other tools, too.
        block: The role's ``profiler`` block.
        parents: Blocks whose values verl copies into this block; copied values get no sentence.
    """
    for names, roles, why in _WITHOUT_COUNTERPART:
        for name in names:
            field = name.replace("*", tool)
            is_other_tool = field.startswith("tool_config.") and f".{tool}." not in field
            if role not in roles or is_other_tool:
                continue
            value = _at(block, field)
            inherited = [_DEFAULTS.get(field)]
            inherited += [_at(parent, field) for parent in parents]
            if value and value not in inherited:
                yield f"{_BLOCKS[role]}.{field.removesuffix('.active')}: {why}"


def _engine_options(
    options: dict[str, Any], given: Mapping[str, Any], tool: str, engine: str
) -> dict[str, Any]:
    """Return the options of a tool as verl passes them on to engines."""
    kept = {
        name: value for name, value in options.items() if name not in ("activities", "mini_batches")
    }
    if tool == "npu":
        contents = given.get("contents") or ()
        kept["stack"] = kept["modules"] = not {"stack", "module"}.isdisjoint(contents)
    if engine in _ENGINES:
        for name, values in adapter_named(engine).profilers[tool].items():
            if name in kept:
                kept[name] = values[-1]
    return kept


def _options(tool: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a tool, translated from verl's ``tool_config`` of the tool."""
    if tool == "torch_memory":
        return {
            "max_entries": given.get("trace_alloc_max_entries", 100_000),
            "steps": given.get("memory_snapshot_num_steps", 1),
        }
    if tool not in _DEVICES:
        return {}
    contents = set(given.get("contents") or ())
    everything = tool == "torch" and not contents
    options: dict[str, Any] = {name: everything or name in contents for name in _CONTENTS}
    if contents and _DEVICES[tool] not in contents:
        options["activities"] = ["cpu"]
    if tool == "npu":
        level = str(given.get("level", "level0")).replace("level_none", "none")
        analysis = bool(given.get("analysis"))
        return options | {"modules": "module" in contents, "level": level, "analysis": analysis}
    schedule = given.get("schedule") or {}
    if schedule.get("active"):
        window = {name: schedule.get(name, 0) for name in ("wait", "warmup", "active")}
        window["wait"] += schedule.get("skip_first", 0)
        options["mini_batches"] = window
    return options


def _at(block: Any, field: str) -> Any:
    """Return a field of a block by its dotted name."""
    for name in field.split("."):
        block = (block or {}).get(name)
    return block


def _tool(key: str, tool: str | None) -> str:
    if tool not in _TOOLS:
        raise ConfigError(key, f"{tool!r} is not supported; {choices_hint(tool, _TOOLS)}")
    return str(tool)


def _finish_commands(blocks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return ``after`` settings for verl's finish hooks: shell commands after the last profiled
    step.

    A worker with several roles runs a common command of the roles only once.
    """
    roles_of: dict[tuple[Any, str, Ranks], list[str]] = {}
    for role in TRAINING_ROLES:
        block = blocks.get(role, {})
        command = block.get("finish_hook_cmd")
        if not (block.get("enable") and command):
            continue
        ranks: Ranks = tuple(block.get("finish_hook_ranks") or ()) or None
        if block.get("finish_hook_all_ranks"):
            ranks = EVERY_RANK
        roles_of.setdefault((command, str(block.get("tool")), ranks), []).append(role)
    export = f"export {_FINISH_ENVIRONMENT} VERL_PROFILE_TOOL="
    commands = {}
    for (command, tool, ranks), roles in roles_of.items():
        commands[f"finish_hook_{roles[0]}"] = {
            "command": ["/bin/sh", "-c", f"{export}{shlex.quote(tool)}\n{command}"],
            "when": "last",
            "roles": roles,
            "ranks": ranks,
        }
    return commands


def plays(config: Any, role: str) -> bool:
    """Return whether a run has a role, for ``ref`` and ``critic`` by verl's own rules."""
    if role not in ("ref", "critic") or config.get("algorithm") is None:
        return True
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    return bool(need_critic(config) if role == "critic" else need_reference_policy(config))
