"""The configuration and its schedule: frozen dataclasses, checked once when they are created."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.capture_request import CaptureSelection, Trigger
from verl_profiling.errors import ConfigError, ToolUnavailableError, choices_hint
from verl_profiling.files.opener import real_folder
from verl_profiling.files.remote import check_url, is_url
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.groups import (
    TRAJECTORIES,
    AfterHook,
    Limits,
    Mode,
    RemoteOptions,
    RoleConfig,
    RoleOverride,
    RolloutOptions,
    Selection,
    Timeouts,
    WatchOptions,
    choose,
    with_selection,
)
from verl_profiling.settings.model_config import model_sizes
from verl_profiling.tools import TOOLS, Tool
from verl_profiling.typed_values import NotNegative, Positive, build, field_types, value_of

__all__ = [
    "Mode",
    "ProfilingConfig",
    "RoleConfig",
    "RoleOverride",
    "Selection",
    "Timeouts",
    "load_tool",
]

MOST_CAPTURES = 10
"""Number of listed captures for a run of unknown length."""
_FAR = 100_000
"""Number of steps that a plan looks at."""


class Action(Enum):
    """An action of the profiler in one step."""

    OFF = "off"
    WARMUP = "warmup"
    RECORD = "record"


@dataclass(frozen=True)
class StepRange:
    """The consecutive steps that one capture covers, both ends included.

    Attributes:
        first: First step; the step folder has its number.
        last: Last step.
        action: ``RECORD``, or ``WARMUP`` for a capture that is discarded.
    """

    first: int
    last: int
    action: Action = Action.RECORD


@dataclass(frozen=True)
class Decision:
    """The decision to capture one or more steps.

    Attributes:
        step_range: The steps to capture.
        trigger: The requester of the capture, and the reason.
        selection: Overrides of the settings, e.g. other ranks; ``None`` without overrides.
    """

    step_range: StepRange
    trigger: Trigger
    selection: CaptureSelection | None = None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Chooses steps in one of three ways: listed, every N, or in cycles.

    Cycles have the meaning of ``torch.profiler.schedule``, counted in RL steps: after
    ``skip_first`` steps, each cycle waits, warms up and records; ``repeat`` cycles in all.
    With nothing set, every step from 1 on is captured.

    Attributes:
        steps: Steps to capture; may be empty with ``watch.enable``. Excludes ``every`` and the
            cycle fields.
        every: Captures the steps divisible by this number, 0 included. Excludes the cycle fields.
        skip_first: Steps before the first cycle, from step 1 on.
        wait: Steps of a cycle that are not profiled.
        warmup: Steps of a cycle with a discarded recording.
        active: Steps of a cycle that are captured.
        repeat: Number of cycles; 0 for no end.
        continuous: Consecutive captured steps form one capture.
    """

    steps: tuple[NotNegative, ...] | None = None
    every: Positive | None = None
    skip_first: NotNegative = 0
    wait: NotNegative = 0
    warmup: NotNegative = 0
    active: Positive = 1
    repeat: NotNegative = 0
    continuous: bool = False

    def __post_init__(self) -> None:
        ways = [name for name in self._given() if name != "continuous"]
        if len(ways) > 1 and ways[0] in ("steps", "every"):
            raise ConfigError(ways[0], f"excludes schedule.{ways[1]}; remove one of them")
        if self.continuous and self.records_every_step:
            raise ConfigError(
                "continuous", "would be one capture without an end; bound it with steps or repeat"
            )

    def _given(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        given = {}
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value != setting.default:
                given[setting.name] = value
        return given

    @property
    def records_every_step(self) -> bool:
        """Whether every step after ``skip_first`` is captured."""
        if self.every is not None:
            return self.every == 1
        return self.steps is None and self.wait == self.warmup == self.repeat == 0

    @cached_property
    def _listed(self) -> frozenset[int]:
        return frozenset(self.steps or ())

    def action(self, step: int) -> Action:
        """Return the profiler's action in ``step``."""
        if self.steps is not None:
            return Action.RECORD if step in self._listed else Action.OFF
        if self.every is not None:
            return Action.RECORD if step >= 0 and step % self.every == 0 else Action.OFF
        index = step - 1 - self.skip_first
        cycle, position = divmod(index, self.wait + self.warmup + self.active)
        if index < 0 or (self.repeat and cycle >= self.repeat) or position < self.wait:
            return Action.OFF
        return Action.WARMUP if position < self.wait + self.warmup else Action.RECORD

    def in_words(self) -> str:
        """Return the settings that differ from their defaults, e.g. ``schedule.every=10``."""
        if self.steps == ():
            return "schedule.steps is empty: only captures on request"
        given = [f"schedule.{name}={value}" for name, value in self._given().items()]
        return ", ".join(given) or "the schedule has every step from step 1 on"

    def last_step(self, limit: int | None = None) -> int | None:
        """Return the last step that may be captured; ``None`` for a schedule without an end.

        Args:
            limit: The last step of the loop, if known.
        """
        ends = [] if limit is None else [limit]
        if self.steps is not None:
            ends.append(max(self.steps, default=0))
        elif self.every is None and self.repeat:
            cycle = self.wait + self.warmup + self.active
            ends.append(self.skip_first + self.repeat * cycle)
        return min(ends, default=None)

    def step_range(self, step: int) -> StepRange | None:
        """Return the capture that ``step`` belongs to, or ``None``."""
        action = self.action(step)
        if action is Action.OFF:
            return None
        first = last = step
        while self.continuous and self.action(first - 1) is action:
            first -= 1
        while self.continuous and self.action(last + 1) is action:
            last += 1
        return StepRange(first, last, action)


def planned_captures(
    schedule: Schedule, steps: int | None
) -> tuple[list[tuple[int, int]], list[int], bool]:
    """Return the captures, the warm-up steps, and whether more captures follow.

    A capture is a pair of its first and its last step. For a run of unknown length, the first
    captures are returned.

    Args:
        schedule: The schedule.
        steps: The last step of the loop, if known.
    """
    captures: list[tuple[int, int]] = []
    warm_ups: list[int] = []
    last = schedule.last_step(steps)
    most = MOST_CAPTURES if last is None else _FAR
    candidates: Iterable[int] = count(
        schedule.every or 1 + schedule.skip_first, schedule.every or 1
    )
    if schedule.steps is not None:
        candidates = sorted(set(schedule.steps))
    for step in islice(candidates, _FAR):
        if last is not None and step > last:
            return captures, warm_ups, False
        if captures and step <= captures[-1][1]:
            continue
        step_range = schedule.step_range(step)
        if step_range is None:
            continue
        if step_range.action is Action.WARMUP:
            warm_ups.append(step)
            continue
        if len(captures) == most:
            return captures, warm_ups, True
        captures.append((step, step_range.last if last is None else min(step_range.last, last)))
    return captures, warm_ups, schedule.steps is None


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """All settings, made from keywords, or by :meth:`from_any` from a dict or ``DictConfig``.

    Values of keywords may be plain mappings and lists, like the values of a dict.

    Attributes:
        enable: Switches profiling on. If ``false``, nothing is created or imported.
        tool: The tool that records: a name, ``"package.module:Class"``, or a list of these.
        mode: ``e2e``: one artifact per worker per step. ``discrete``: one per worker per stage.
        save_path: Folder of the run, or a URL (``s3://bucket/run``); step folders are made inside.
            ``~`` and environment variables are expanded. If another run uses the folder, this run
            records into ``run_2``, ``run_3``, ... inside it.
        run_id: Name of the run. A run that is started again with the same name, e.g. from a
            checkpoint, continues in ``run_2``, ``run_3``, ... ``None``: each start is a run of its
            own.
        spmd: Whether every rank runs the loop with its own callback, and all ranks record one
            capture together. ``None``: yes, if there are several ranks and all workers of the
            callback are objects of its process. ``False``: this callback records alone. ``True``:
            yes, even without workers.
        strict: Raise errors of tools in the training loop instead of only reporting them.
        model: Sizes of the trained model: the Hugging Face configuration (as a mapping), or the
            folder of the model.
        job: Settings of your own job, by name, which ``diff`` compares.
        schedule: The steps that are captured.
        select: The workers and stages that are captured.
        roles: Settings that differ for a role, by its name.
        tools: Options of the tools, by name.
        rollout: The part of a rollout that its engine records.
        timeouts: The longest waits for workers.
        limits: Disk and memory that captures may take.
        remote: Uploads, where ``save_path`` is a URL.
        after: Commands to run after a capture is written, by names of your choice.
        watch: A summary of every step, and captures on request during the run.
    """

    enable: bool = False
    tool: str | tuple[str, ...] = "torch"
    mode: Mode = "e2e"
    save_path: str = "outputs/profiling"
    run_id: str | None = None
    spmd: bool | None = None
    strict: bool = False
    model: str | dict[str, Any] | None = None
    job: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=Schedule)
    select: Selection = field(default_factory=Selection)
    roles: dict[str, RoleOverride] = field(default_factory=dict)
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    after: dict[str, AfterHook] = field(default_factory=dict)
    watch: WatchOptions = field(default_factory=WatchOptions)

    def __post_init__(self) -> None:
        for name, kind in field_types(ProfilingConfig).items():
            object.__setattr__(self, name, value_of(kind, getattr(self, name), name))
        object.__setattr__(self, "save_path", _expanded("save_path", self.save_path))
        if self.run_id == "":
            raise ConfigError("run_id", "is empty; leave it out, or name the run")
        if self.schedule.steps == () and not self.watch.enable:
            raise ConfigError(
                "schedule.steps",
                "is empty, so nothing would be captured; set enable=false instead, or "
                "watch.enable=true to capture on request",
            )
        if not self.enable:
            return
        self._read_models()
        used = {name for role in ("", *self.roles) for name in self.tool_names(role)}
        for name in self.tools:
            if name not in used and name not in TOOLS:
                raise ConfigError(
                    f"tools.{name}", f"no tool of that name is used; {choices_hint(name, TOOLS)}"
                )
        for role in ("", *self.roles):
            self.for_role(role)
        if self.is_remote:
            self._check_remote()

    def _read_models(self) -> None:
        """Replace models by their sizes, which are written into ``run.json``."""
        if self.model is not None:
            object.__setattr__(self, "model", model_sizes(self.model, "model"))
        for role, override in self.roles.items():
            if override.model is not None:
                sizes = model_sizes(override.model, f"roles.{role}.model")
                self.roles[role] = replace(override, model=sizes)

    @cached_property
    def is_remote(self) -> bool:
        """Whether the run is written behind a URL."""
        return is_url(self.save_path)

    @property
    def local_folder(self) -> Path:
        """The local folder for all files: ``save_path``,
        or ``remote.staging`` if ``save_path`` is a URL.
        """
        if self.is_remote:
            return self.remote.staging_folder
        return real_folder(Path(self.save_path).absolute())

    def _check_remote(self) -> None:
        try:
            check_url(self.save_path)
        except ToolUnavailableError as error:
            raise ConfigError("save_path", str(error)) from error
        if self.limits.keep_last is not None:
            raise ConfigError(
                "limits.keep_last",
                "removes old captures of a local folder, but save_path is a URL; unset it",
            )
        for role in ("", *self.roles):
            tool = self.for_role(role).launched_tool
            if tool is not None:
                key = f"roles.{role}.tool" if role else "tool"
                raise ConfigError(
                    key,
                    f"{tool.name} writes after processes have ended, without uploads: set "
                    "save_path to a folder, and copy the folder after the run",
                )

    @classmethod
    def from_any(cls, config: ProfilingConfig | Mapping[str, Any] | None) -> ProfilingConfig:
        """Return a configuration from a dict, an OmegaConf ``DictConfig``, or a
        ``ProfilingConfig``.

        Raises:
            ConfigError: A key is unknown, a value has the wrong type, or the settings
                contradict each other. The message names the dotted key.
        """
        if isinstance(config, cls):
            return config
        return build(cls, {} if config is None else config, "")

    def for_role(self, role: str, selection: CaptureSelection | None = None) -> RoleConfig:
        """Return the settings of one role, computed once.

        Args:
            role: The role.
            selection: Settings of one capture that differ.

        Raises:
            ConfigError: The role's settings or the selection are wrong.
        """
        if (role, selection) not in self._by_role:
            self._by_role[role, selection] = self._resolve(role, selection)
        return self._by_role[role, selection]

    @cached_property
    def _by_role(self) -> dict[tuple[str, CaptureSelection | None], RoleConfig]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached role settings, because a tool of a user may not be picklable."""
        return {name: getattr(self, name) for name in field_types(ProfilingConfig)}

    def _resolve(self, role: str, selection: CaptureSelection | None) -> RoleConfig:
        override = self.roles.get(role, RoleOverride())
        select = self.select
        key = f"roles.{role}." if role in self.roles else ""
        names = self.tool_names(role)
        if selection is not None:
            override, select = with_selection(selection, role, override, select, names)
            names = self._names_of(override, key)
        tools = tuple(self._build_tool(name, override, key) for name in names)
        for tool in tools:
            if clash := sorted(tool.conflicts.intersection(names)):
                raise ConfigError(
                    f"{key}tool", f"{tool.name} cannot record together with {', '.join(clash)}"
                )
        is_selected = select.roles is None or role in select.roles
        return RoleConfig(
            role=role,
            enable=self.enable and override.enable and is_selected,
            tools=tools,
            tool_names=[tool.name for tool in tools],
            mode=override.mode or self.mode,
            **choose(override, select, key),
            limits=self.limits,
        )

    def with_tool(self, role: str, tool: str) -> ProfilingConfig:
        """Return the settings with another tool for a role."""
        override = replace(self.roles.get(role, RoleOverride()), tool=tool, tools={})
        return replace(self, roles={**self.roles, role: override})

    def with_trajectories(self, role: str) -> ProfilingConfig:
        """Return the settings with trajectories added to the tools of a role.

        Raises:
            ConfigError: A tool of the role cannot record together with trajectories.
        """
        override = self.roles.get(role, RoleOverride())
        names = () if override.tool is None else self.tool_names(role)
        tools = [name for name in names if name != TRAJECTORIES]
        mode = override.mode or "e2e"
        recording = replace(override, tool=(*tools, TRAJECTORIES), mode=mode)
        return replace(self, roles={**self.roles, role: recording})

    def cautions(self, has_engines: bool = True) -> list[str]:
        """Return warnings about settings that are valid but may hurt the run, or have no effect.

        Args:
            has_engines: Whether rollout engines take part.
        """
        cautions = self.watch.cautions(self.schedule.records_every_step)
        rollout = self.for_role(ROLLOUT_ROLE)
        if has_engines and rollout.enable:
            for tool in rollout.tools:
                if tool.name == "torch":
                    has_stacks = bool(getattr(tool.options, "stack", None))
                    cautions += self.rollout.cautions(has_stacks)
        return cautions

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-compatible values, valid for :meth:`from_any`."""
        return typing.cast("dict[str, Any]", msgspec.to_builtins(self))

    def tool_names(self, role: str) -> tuple[str, ...]:
        """Return the names of a role's tools; for an empty role,
        the names in the common setting ``tool``.
        """
        return self._names_of(self.roles.get(role, RoleOverride()), f"roles.{role}.")

    def _names_of(self, override: RoleOverride, key: str) -> tuple[str, ...]:
        """Return the names of a role's tools, from the role's settings or the common setting."""
        tool, key = override.tool, f"{key}tool"
        if tool is None:
            tool, key = self.tool, "tool"
        names = (tool,) if isinstance(tool, str) else tuple(tool)
        if not names:
            raise ConfigError(key, "is empty; set enable=false to record nothing")
        if len(set(names)) < len(names):
            raise ConfigError(key, f"has a tool twice: {', '.join(names)}")
        return names

    def _build_tool(self, name: str, override: RoleOverride, key: str) -> Tool:
        tool_class = load_tool(name, f"{key}tool" if override.tool is not None else "tool")
        own = override.tools.get(name, {})
        where = f"tools.{name}"
        if own:
            where = f"{key}{where}"
        options = {**self.tools.get(name, {}), **own}
        return tool_class(build(tool_class.options_class, options, where))


def _expanded(key: str, path: str) -> str:
    """Return a path with ``~`` and environment variables expanded.

    Raises:
        ConfigError: The path is empty, holds a NUL, or has an unknown variable or user.
    """
    if not path or "\0" in path:
        raise ConfigError(key, "holds a NUL character" if path else "is empty")
    expanded = os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (pathlib has no variables)
    if unknown := re.search(r"\$\w+|\$\{\w+\}|^~", expanded):
        raise ConfigError(
            key, f"{unknown[0]} in {path!r} has no value here; set it, or write the full path"
        )
    return expanded


def load_tool(name: str, key: str = "tool") -> type[Tool]:
    """Return the class of a tool.

    Args:
        name: A name from :data:`verl_profiling.tools.TOOLS`, or ``"package.module:Class"`` for
            another tool.
        key: Configuration key for error messages.

    Raises:
        ConfigError: There is no such tool.
    """
    location = TOOLS.get(name, name)
    module_name, separator, class_name = location.partition(":")
    if not separator:
        raise ConfigError(
            key, f"unknown tool {name!r}; {choices_hint(name, TOOLS)}, or 'package.module:Class'"
        )
    try:
        tool = getattr(import_module(module_name), class_name)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(key, f"tool {name!r} cannot be imported: {error}") from error
    if not (isinstance(tool, type) and issubclass(tool, Tool)):
        raise ConfigError(key, f"{name!r} is not a subclass of verl_profiling.tools.Tool")
    return tool
