"""Reads from a configuration of verl what to profile.

Either ``profiling`` holds settings of this package, or it is ``verl`` (``+profiling=verl``) and the
settings are read from the ``global_profiler`` and ``profiler`` blocks of verl's own profiler. The
table in docs/verl.md says which of their fields become which settings.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.integrations.verl_nsys import expected_ranges
from verl_profiling.integrations.verl_rollout import check_rollout, device_of
from verl_profiling.settings.after import EVERY_RANK
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["settings_from_verl", "settings_of", "settings_without_checks"]

logger = logging.getLogger(__name__)

_GROUPS = ("default", "discrete", "off", "verl")
_ROLES = {
    "actor": "actor_rollout_ref.actor.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "rollout": "actor_rollout_ref.rollout.profiler",
    "critic": "critic.profiler",
}
_TOOLS = ("torch", "torch_memory", "npu", "nsys")
_ALWAYS = "always so: every artifact is in the folder of its step"
_FINISH_ENVIRONMENT = 'VERL_PROFILE_SAVE_PATH="$VERL_PROFILING_RUN" ' + " ".join(
    f'VERL_PROFILE_{name}="$VERL_PROFILING_{name}"' for name in ("RANK", "PID", "ROLE")
)
_FINISH_HOOK = ("finish_hook_cmd", "finish_hook_all_ranks", "finish_hook_ranks")
_HOOKED_ROLES = ("actor", "ref", "critic")


def settings_of(config: Any) -> ProfilingConfig | None:
    """Return the settings in a verl configuration, or ``None`` if nothing is to be profiled.

    With ``profiling=verl``, verl's own profiler is switched off in ``config``: this one replaces it.

    Raises:
        ConfigError: The settings are wrong, or verl's own profiler is switched on as well.
    """
    given = config.get("profiling")
    if given is None:
        return None
    steps = config.global_profiler.get("steps")
    if isinstance(given, str):
        if given != "verl":
            raise ConfigError(
                "profiling",
                f"is the word {given!r}, because Hydra found no group of that name; write +profiling=e2e (or "
                f"{', '.join(_GROUPS)}), with verl_profiling installed where the command runs, or with "
                "'hydra.searchpath=[pkg://verl_profiling.conf]'",
            )
        settings = settings_from_verl(config)
        config.global_profiler.steps = None
    else:
        settings = ProfilingConfig.from_any(given)
        if settings.enable and steps:
            raise ConfigError(
                "profiling",
                f"verl's own profiler is switched on too (global_profiler.steps={list(steps)}), and two "
                "profilers in one process destroy each other's recordings; set global_profiler.steps=null, "
                "or +profiling=verl to have its settings used here",
            )
    if not settings.enable:
        return None
    check_rollout(config, settings)
    expected_ranges(config, settings)
    return dataclasses.replace(
        settings,
        save_path=settings.save_path if settings.is_remote else str(settings.local_folder),
        run_id=settings.run_id or _run_id(config.get("trainer") or {}),
    )


def _run_id(trainer: Mapping[str, Any]) -> str | None:
    """Return the name under which verl finds the run's checkpoints again; ``None`` where it does not look."""
    if trainer.get("resume_mode", "disable") == "disable":
        return None
    return f"{trainer['project_name']}/{trainer['experiment_name']}"


def settings_without_checks(config: Any) -> ProfilingConfig | None:
    """Return the settings in a verl configuration as they stand, and change and say nothing.

    Raises:
        ConfigError: They are wrong.
    """
    given = config.get("profiling")
    if given is None:
        return None
    return ProfilingConfig.from_any(_Bridge(config).settings() if isinstance(given, str) else given)


def settings_from_verl(config: Any) -> ProfilingConfig:
    """Return the settings that correspond to the profiler blocks of a verl configuration.

    Fields without a counterpart are logged as warnings, by their key.

    Args:
        config: A whole verl configuration (of ``main_ppo``), as ``DictConfig``.

    Raises:
        ConfigError: A value without a counterpart cannot be ignored, e.g. the tool.
    """
    bridge = _Bridge(config)
    settings = ProfilingConfig.from_any(bridge.settings())
    for note in bridge.notes:
        logger.warning("%s", note)
    return settings


class _Bridge:
    """Reads the profiler blocks of a configuration once.

    Attributes:
        notes: One sentence for each field that is set and has no counterpart.
    """

    def __init__(self, config: Any) -> None:
        from omegaconf import OmegaConf

        self.notes: list[str] = []
        rollout = config.actor_rollout_ref.rollout
        self._engine = rollout.name
        self._rollout_tool = "npu" if device_of(config) == "npu" else "torch"
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        self._replica_ranks = math.prod(rollout.get(size) or 1 for size in sizes)
        self._global = OmegaConf.to_container(config.global_profiler, resolve=True)
        self._roles = {}
        for role, path in _ROLES.items():
            block = OmegaConf.select(config, path)
            if block is not None and _plays(config, role):
                self._roles[role] = OmegaConf.to_container(block, resolve=True)

    def settings(self) -> dict[str, Any]:
        """Return the settings as :meth:`ProfilingConfig.from_any` takes them."""
        block = self._global
        steps = block.get("steps") or []
        self._note_relocation("global_profiler", block)
        tool = self._tool("global_profiler.tool", block.get("tool")) if steps else None
        return {
            "enable": bool(steps) and any(role.get("enable") for role in self._roles.values()),
            "tool": tool or "torch",
            "save_path": block["save_path"],
            "schedule": {"steps": list(steps), "continuous": bool(block["profile_continuous_steps"])}
            if steps
            else {},
            "roles": {role: self._role(role, given) for role, given in self._roles.items()},
            "rollout": self._window(self._roles.get("rollout", {})),
            "after": self._hooks(),
        }

    def _role(self, role: str, block: Mapping[str, Any]) -> dict[str, Any]:
        if not block.get("enable"):
            return {"enable": False}
        where = _ROLES[role]
        self._note_relocation(where, block)
        if (path := block.get("save_path")) not in (None, self._global["save_path"]):
            self.notes.append(f"{where}.save_path={path}: all roles write to global_profiler.save_path")
        tool = self._tool(f"{where}.tool", block.get("tool"))
        if role == "rollout" and tool != self._rollout_tool:
            self.notes.append(
                f"{where}.tool={tool}: rollout engines record with {self._rollout_tool}; left out"
            )
            return {"enable": False}
        options = (block.get("tool_config") or {}).get(tool) or {}
        found: dict[str, Any] = {"tool": tool, "mode": "discrete" if options.get("discrete") else "e2e"}
        if not block.get("all_ranks"):
            first = range(self._replica_ranks) if role == "rollout" else (0,)
            found["ranks"] = list(block.get("ranks") or first)
        if own := dict(self._options(role, tool, options, f"{where}.tool_config.{tool}")):
            found["tools"] = {tool: own}
        return found

    def _options(
        self, role: str, tool: str, options: Mapping[str, Any], where: str
    ) -> Iterator[tuple[str, Any]]:
        """Yield the options of a tool."""
        contents = set(options.get("contents") or ())
        for name in ("profile_token_start", "profile_token_end"):
            if role != "rollout" and options.get(name) is not None:
                self.notes.append(f"{where}.{name}: a window of engine iterations is for the rollout only")
        if tool == "torch":
            everything = not contents
            for name in ("stack", "shapes", "memory"):
                if role == "rollout" and name == "memory" and self._engine == "sglang":
                    yield name, False  # SGLang does not have it, under verl neither
                else:
                    yield name, everything or name in contents
            if not everything and "cuda" not in contents:
                if role == "rollout":
                    self.notes.append(f"{where}.contents: engines record all activities that there are")
                else:
                    yield "activities", ["cpu"]
            schedule = options.get("schedule") or {}
            if schedule.get("active") and role == "rollout":
                self.notes.append(f"{where}.schedule: engines have no mini-batches")
            elif schedule.get("active"):
                if schedule.get("repeat", 0) > 1:
                    self.notes.append(f"{where}.schedule.repeat: one window of mini-batches is recorded")
                yield (
                    "mini_batches",
                    {
                        "wait": schedule.get("skip_first", 0) + schedule.get("wait", 0),
                        "warmup": schedule.get("warmup", 0),
                        "active": schedule["active"],
                    },
                )
        elif tool == "npu" and role == "rollout":
            # As verl passes them on to engines: these choose the rest, the level too.
            stack, memory = bool(contents & {"stack", "module"}), "memory" in contents
            if self._engine == "vllm":
                yield from {"modules": stack, "memory": memory}.items()
            else:
                yield from {"stack": stack, "shapes": "shapes" in contents}.items()
            yield "analysis", bool(options.get("analysis"))
        elif tool == "npu":
            for name, content in (
                ("stack", "stack"),
                ("shapes", "shapes"),
                ("memory", "memory"),
                ("modules", "module"),
            ):
                yield name, content in contents
            if contents and "npu" not in contents:
                yield "activities", ["cpu"]
            yield "level", str(options.get("level", "level0")).replace("level_none", "none")
            yield "analysis", bool(options.get("analysis"))
        elif tool == "torch_memory":
            yield "max_entries", options.get("trace_alloc_max_entries", 100_000)
            yield "steps", options.get("memory_snapshot_num_steps", 1)
            yield "oom_folder", str(Path(self._global["save_path"], "oom").absolute())
            if options.get("stack_depth", 32) != 32:
                self.notes.append(f"{where}.stack_depth: has no counterpart; torch keeps whole stacks")

    def _window(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return the window of engine iterations, which verl calls response tokens."""
        options = (block.get("tool_config") or {}).get(block.get("tool")) or {}
        start, end = options.get("profile_token_start") or 0, options.get("profile_token_end")
        return {"start": start, "count": None if end is None else end - start, "max_window_s": None}

    def _tool(self, key: str, tool: str | None) -> str:
        if tool not in _TOOLS:
            raise ConfigError(key, f"{tool!r} is not supported; {choices_hint(tool, _TOOLS)}")
        return str(tool)

    def _note_relocation(self, where: str, block: Mapping[str, Any]) -> None:
        if block.get("relocate_results"):
            self.notes.append(f"{where}.relocate_results: {_ALWAYS}")

    def _hooks(self) -> dict[str, Any]:
        """Return verl's finish commands, which it runs in a shell, once, after the last step it profiles.

        Workers that play several roles run a command that these share once.
        """
        found: dict[str, Any] = {}
        rollout, actor = self._roles.get("rollout", {}), self._roles.get("actor", {})
        for name in _FINISH_HOOK if rollout.get("enable") else ():
            if rollout.get(name) and rollout[name] != actor.get(name):
                self.notes.append(f"{_ROLES['rollout']}.{name}: servers run no command, under verl neither")
        for role in _HOOKED_ROLES:
            block = self._roles.get(role, {})
            if not (block.get("enable") and (command := block.get("finish_hook_cmd"))):
                continue
            names = f"export VERL_PROFILE_TOOL={shlex.quote(str(block.get('tool')))} {_FINISH_ENVIRONMENT}"
            hook = {
                "command": ["/bin/sh", "-c", f"{names}\n{command}"],
                "when": "last",
                "ranks": EVERY_RANK
                if block.get("finish_hook_all_ranks")
                else list(block.get("finish_hook_ranks") or ()) or None,
            }
            equal = [other for other in found.values() if {**other, **hook} == other]
            if equal:
                equal[0]["roles"].append(role)
            else:
                found[f"finish_hook_{role}"] = {"roles": [role], **hook}
        return found


def _plays(config: Any, role: str) -> bool:
    """Return whether a run has a role; as verl decides, which is asked only where it is a question."""
    if role not in ("ref", "critic") or config.get("algorithm") is None:
        return True
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    return bool(need_critic(config) if role == "critic" else need_reference_policy(config))
