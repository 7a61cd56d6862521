"""The configuration: frozen dataclasses, checked once when they are created."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.capture_request import CaptureSelection
from verl_profiling.errors import ConfigError, ToolUnavailableError, choices_hint
from verl_profiling.files.opener import real_folder
from verl_profiling.files.remote import check_url, is_url
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.limits import AfterHook, Limits, RemoteOptions, Timeouts
from verl_profiling.settings.role import (
    TRAJECTORIES,
    Mode,
    RoleConfig,
    RoleOverride,
    Selection,
    choose,
    with_selection,
)
from verl_profiling.settings.rollout import RolloutOptions
from verl_profiling.settings.schedule import Schedule
from verl_profiling.settings.watch import WatchOptions
from verl_profiling.tools import TOOLS, Tool
from verl_profiling.typed_values import build, field_types, value_of

__all__ = [
    "Mode",
    "ProfilingConfig",
    "RoleConfig",
    "RoleOverride",
    "Selection",
    "Timeouts",
    "load_tool",
]


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
                "limits.keep_last", "counts files of a folder, but save_path is a URL"
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
        stages = select.stages if override.stages is None else override.stages
        is_selected = select.roles is None or role in select.roles
        return RoleConfig(
            role=role,
            enable=self.enable and override.enable and is_selected,
            tools=tools,
            tool_names=[tool.name for tool in tools],
            mode=override.mode or self.mode,
            **choose(override, select, key),
            stages=frozenset(stages) if stages is not None else None,
            limits=self.limits,
        )

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
        tool, key = (self.tool, "tool") if override.tool is None else (override.tool, f"{key}tool")
        names = (tool,) if isinstance(tool, str) else tuple(tool)
        if not names:
            raise ConfigError(key, "is empty; set enable=false to record nothing")
        if len(set(names)) < len(names):
            raise ConfigError(key, f"has a tool twice: {', '.join(names)}")
        return names

    def _build_tool(self, name: str, override: RoleOverride, key: str) -> Tool:
        tool_class = load_tool(name, f"{key}tool" if override.tool is not None else "tool")
        options = override.tools.get(name, {})
        where = f"{key}tools.{name}" if options else f"tools.{name}"
        options = {**self.tools.get(name, {}), **options}
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
