"""The configuration: all settings but those of the schedule, of roles and of limits.

Settings are frozen dataclasses, checked once when they are created.
"""

from __future__ import annotations

import os
import re
import tempfile
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from verl_profiling.capture_request import CaptureSelection, Ranks, parse_ranks
from verl_profiling.errors import ConfigError, ToolUnavailableError, choices_hint
from verl_profiling.files.opener import real_folder
from verl_profiling.files.remote import check_url, is_url
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.roles import (
    TRAJECTORIES,
    Limits,
    Mode,
    RoleConfig,
    RoleOverride,
    Selection,
    choose,
    load_tool,
    model_sizes,
    with_selection,
)
from verl_profiling.settings.schedule import Schedule
from verl_profiling.tools import TOOLS, Tool
from verl_profiling.typed_values import (
    NotNegative,
    Positive,
    Seconds,
    build,
    field_types,
    value_of,
)

__all__ = ["ProfilingConfig", "RoleConfig", "Schedule"]  # the names of docs/api.md

EVERY_RANK = "all"
Ratio = Annotated[float, msgspec.Meta(gt=1, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Growth = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Timeouts of the callback for workers, in seconds. A worker that needs longer is ``failed``.

    Attributes:
        start_s: Time for a capture to start.
        stop_s: Time for a capture to stop, including the export of the trace.
        finish_s: Time at the end of the run for workers that missed ``stop_s``, and the same time
            again for compression in the background.
    """

    start_s: Seconds = 60.0
    stop_s: Seconds = 600.0
    finish_s: Seconds = 120.0


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Uploads, where ``save_path`` is a URL.

    Attributes:
        staging: Folder on each host in which files wait for their upload; ``None``: a folder of the
            user in the system's temporary folder.
        retry_s: Seconds for which a failed upload is retried. After that, the file stays in
            ``staging``.
    """

    staging: str | None = None
    retry_s: Seconds = 60.0

    def __post_init__(self) -> None:
        if self.staging is not None and not Path(self.staging).is_absolute():
            raise ConfigError(
                "staging", f"{self.staging!r} must be an absolute path, because all hosts use it"
            )

    @property
    def staging_folder(self) -> Path:
        """The staging folder on this host."""
        return Path(
            self.staging or f"{tempfile.gettempdir()}/verl-profiling-{os.getuid()}"
        ).absolute()


@dataclass(frozen=True, kw_only=True)
class AfterHook:
    """A command that runs in the background after a capture is written.

    Attributes:
        command: Program and arguments; no shell. Environment variables describe the capture:
            ``VERL_PROFILING_FOLDER``, and likewise ``..._RUN``, ``_STEP``, ``_ROLE``, ``_RANK`` and
            ``_PID``.
        when: ``capture``: after each capture. ``last``: once, after the last capture of the
            schedule, or at the end of training.
        roles: The roles whose processes run the command. The ``controller`` (the process of the
            training loop) runs the command after the whole capture is written. A worker runs the
            command after its own artifacts are written.
        ranks: Ranks of these roles, written like ``select.ranks``. ``None``: the ranks that record.
            ``all``: also the ranks that do not record.
        timeout_s: Seconds after which the command and its child processes are terminated. If
            files of the capture are not written within this time, it starts all the same.
    """

    command: tuple[str, ...] = ()
    when: Literal["capture", "last"] = "capture"
    roles: tuple[str, ...] = ("controller",)
    ranks: Ranks = None
    timeout_s: Seconds = 600.0

    def __post_init__(self) -> None:
        if not self.command or "\0" in "".join(self.command):
            raise ConfigError("command", "must be a list of a program and its arguments")
        if not self.roles:
            raise ConfigError("roles", "is empty; leave it out for the controller")
        if self.ranks != EVERY_RANK:
            parse_ranks(self.ranks, "ranks")

    def runs_on(self, role: str, rank: int, records: bool) -> bool:
        """Return whether a process runs the command.

        Args:
            role: Role of the process.
            rank: Rank of the process.
            records: Whether the process records.
        """
        if role not in self.roles:
            return False
        if self.ranks is None or self.ranks == EVERY_RANK:
            return records or self.ranks is not None
        return rank in (parse_ranks(self.ranks, "ranks") or ())


_COUNT_WITH_STACKS = 10
_MANY_WITH_STACKS = 100


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The part of a rollout that its engine records.

    An engine iteration is one forward pass of a whole batch. An iteration makes one token for each
    decoding request, so iterations are not tokens.

    Attributes:
        start: Engine iterations before the begin of recording (vLLM).
        count: Engine iterations to record; ``None`` for no limit, or for 10 with stacks or
            by stage.
        max_window_s: Seconds after which recording ends in any case; ``None`` for no limit.
        stop_s: Timeout (s) of the engine's stop and of writing its traces; at most nine tenths of
            ``timeouts.stop_s``, so that the result still reaches the callback.
        requests: Log begin, first token, end and lengths of each request.
        prompt_hashes: Log hashes of the blocks of each prompt, for a replay that shares prefixes.
        profile_by_stage: Record ``count`` iterations of prefill, and as many of decode, each into a
            trace of its own (SGLang).
        merge_profiles: Let SGLang write one more file, with all ranks of the replica.
    """

    start: NotNegative = 0
    count: Positive | None = None
    max_window_s: Seconds | None = 30.0
    stop_s: Seconds = 300.0
    requests: bool = True
    prompt_hashes: bool = False
    profile_by_stage: bool = False
    merge_profiles: bool = False

    def with_count(self) -> RolloutOptions:
        """Return these options with a limit on iterations, for a recording with stacks or by stage.

        An idle engine polls with a million Python calls a second. Writing these calls takes far
        longer than the calls themselves.
        """
        return self if self.count is not None else replace(self, count=_COUNT_WITH_STACKS)

    def cautions(self, stacks: bool) -> list[str]:
        """Return a warning that an engine's recording without a limit may kill the engine.

        The list is empty if a time limit is set, or a low number of iterations.

        Args:
            stacks: Whether the tool records Python's stacks, which are far more events.
        """
        risky = (self.count or 0) > _MANY_WITH_STACKS if stacks else self.count is None
        if self.max_window_s is not None or not risky:
            return []
        return [
            f"rollout.max_window_s is null, and rollout.count is {self.count or 'null'}: a small "
            "model has about 450 events an iteration and rank, with stacks 2,700. Each takes 1.4 "
            "kB of the engine's memory when it stops, and engines were killed by this. Set "
            "max_window_s, or a lower count"
        ]

    @property
    def bounded(self) -> bool:
        """Whether recording is limited to a window of iterations,
        which may be beyond a short rollout.
        """
        return bool(self.start or self.count is not None)


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """Thresholds from which the watch requests a capture. ``None`` switches a threshold off.

    Attributes:
        slow_step: Approximate ratio of a slow step's duration to the median of the window;
            ``null``: off.
        slow_stage: Approximate ratio of a slow stage's exposed time to its median; ``null``: off.
        slow_span: Approximate ratio of a span's mean time per call to its median; ``null``: off.
        leader: Share of the step by which one process is slower than the others in a stage, in most
            of five steps; ``null``: off.
        memory: Share by which the memory of a holder grows steadily, in 14 readings or more;
            ``null``: off.
        window: Number of earlier steps to compare a step with; may exceed ``watch.steps``.
        cooldown: Number of steps after a capture of the watch without further requests of the
            watch.
        max_captures: Maximum number of captures that the watch requests in a run.
    """

    slow_step: Ratio | None = 1.3
    slow_stage: Ratio | None = 1.3
    slow_span: Ratio | None = 1.5
    leader: Share | None = 0.1
    memory: Growth | None = 0.2
    window: Annotated[int, msgspec.Meta(ge=3)] = 20
    cooldown: NotNegative = 50
    max_captures: NotNegative = 3


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Summaries of every step, and captures on request during the run.

    Attributes:
        enable: Switches the watch on.
        steps: Number of steps whose summaries are kept.
        every: Number of steps between readings of the workers; fewer if steps are long. Workers are
            also read after every capture; with 0, only then.
        trigger: Thresholds from which the watch requests a capture; ``null``: none.
        hang_s: Minimum time without any progress after which a step hangs; longer in stages that
            usually take more than a third of it.
        first_hang_s: The same for stages whose usual duration is not known yet.
        sinks: Trackers that get each step's numbers, notices, and reports of captures; add your own
            to ``watch.listeners``.
    """

    enable: bool = False
    steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    # 10: a reading costs the loop as much as ten summaries; steps over 0.1 s are read each second.
    every: NotNegative = 10
    trigger: Anomaly | None = None
    hang_s: Seconds = 30.0
    first_hang_s: Seconds = 600.0
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] | None = None

    def cautions(self, records_every_step: bool) -> list[str]:
        """Return warnings about settings that have no effect.

        Args:
            records_every_step: Whether the schedule captures all steps.
        """
        if not self.enable and (self.trigger is not None or self.sinks is not None):
            return ["watch.trigger and watch.sinks have no effect without watch.enable=true"]
        if self.trigger is not None and records_every_step:
            return [
                "watch.trigger: never requests a capture, as the schedule captures every step, "
                "and the watch does not judge captured steps; set schedule.steps=[] to capture "
                "only on request, or schedule.every"
            ]
        return []


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
