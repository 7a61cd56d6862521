"""The groups of the configuration, but for the schedule; and the settings of one role."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from verl_profiling.capture_request import CaptureSelection, Ranks, coordinates_in, parse_ranks
from verl_profiling.errors import ConfigError
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.watch_thresholds import Anomaly
from verl_profiling.tools import Tool
from verl_profiling.typed_values import NotNegative, Positive, Seconds, Size

EVERY_RANK = "all"
_GB = Size(1_000_000_000)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Disk and memory that captures may take. A size is a number of bytes, or ``2GB`` or
    ``512MiB``.

    Attributes:
        min_free_bytes: Minimum free space on a file system. With less free space, a callback or
            worker records nothing.
        keep_last: Number of captures to keep; older captures are removed. ``null``: all.
        memory_share: Share of the host's available memory for writing recordings, divided by the
            workers of the host. A recording that needs more ends with its stage or mini-batch.
    """

    min_free_bytes: Size = _GB
    keep_last: Positive | None = None
    memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5


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


Mode = Literal["e2e", "discrete"]
TRAJECTORIES = "trajectories"
_ROLLOUT_STAGE = "rollout"
_ONE_PER_PP_STAGE = "one_per_pp_stage"
"""Text in place of ranks, for the first rank of each pipeline stage."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Ranks selected by coordinates in the parallel dimensions; ``None`` selects all.

    Coordinates are written like ``ranks``, where -1 is the last one: ``pp: [0, -1]``. For a worker
    without a dimension, the dimension is ignored.

    Attributes:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        dp: Data-parallel ranks.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks.
    """

    tp: Ranks = None
    pp: Ranks = None
    dp: Ranks = None
    cp: Ranks = None
    ep: Ranks = None


_DIMENSIONS = tuple(dimension.name for dimension in fields(Coordinates))


@dataclass(frozen=True, kw_only=True)
class Selection(Coordinates):
    """The roles, ranks and stages to capture; ``None`` selects all.

    Attributes:
        roles: Roles that take part.
        ranks: Global accelerator ranks inside the role: ``"0,8-15"``, a number or a list; or
            ``one_per_pp_stage``, the first rank of each pipeline stage.
        replicas: Rollout replicas, written like ``ranks``.
        stages: Stages that are recorded in discrete mode.
    """

    roles: tuple[str, ...] | None = None
    ranks: Ranks = None
    replicas: Ranks = None
    stages: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class RoleOverride(Coordinates):
    """Settings of one role; ``None`` for the common setting of all roles.

    Attributes:
        enable: ``False`` leaves the role out.
        tool: Name or names of the tools.
        mode: ``e2e`` or ``discrete``.
        ranks: As ``select.ranks``.
        replicas: As ``select.replicas``.
        stages: As ``select.stages``.
        tools: Options by tool name; they replace the common options key by key.
        model: Sizes of the role's model, as the setting ``model``.
    """

    enable: bool = True
    tool: str | tuple[str, ...] | None = None
    mode: Mode | None = None
    ranks: Ranks = None
    replicas: Ranks = None
    stages: tuple[str, ...] | None = None
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)
    model: str | dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """The configuration of one role: overrides applied, ranks parsed, tools built.

    Attributes:
        tool_names: Names of the tools in manifests.
        ranks: Global ranks that take part; ``None``: all.
        replicas: Rollout replicas that take part; ``None``: all.
        coordinates: Coordinates by dimension; negative numbers count from the end.
    """

    role: str
    enable: bool
    tools: tuple[Tool, ...]
    tool_names: list[str]
    mode: Mode
    ranks: frozenset[int] | None
    replicas: frozenset[int] | None
    coordinates: dict[str, frozenset[int]]
    stages: frozenset[str] | None
    limits: Limits = field(default_factory=Limits)

    @property
    def launched_tool(self) -> Tool | None:
        """The tool that has to start the role's processes, if there is one."""
        return next((tool for tool in self.tools if tool.starts_process), None)

    def selects(
        self,
        rank: int,
        replica: int | None = None,
        topology: Mapping[str, int] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> bool:
        """Return whether a worker takes part in captures.

        Args:
            rank: Global rank inside the role.
            replica: Index of the rollout replica.
            topology: Coordinates of the worker by dimension.
            sizes: Number of ranks along these dimensions, needed to count from the end.
        """
        if not self.enable or (self.ranks is not None and rank not in self.ranks):
            return False
        for dimension, index in (topology or {}).items():
            wanted = self.coordinates.get(dimension)
            from_end = index - sizes[dimension] if sizes and dimension in sizes else index
            if wanted is not None and wanted.isdisjoint((index, from_end)):
                return False
        return replica is None or self.replicas is None or replica in self.replicas


def with_selection(
    selection: CaptureSelection,
    role: str,
    override: RoleOverride,
    select: Selection,
    tools: tuple[str, ...],
) -> tuple[RoleOverride, Selection]:
    """Return a role's settings and the selection of all roles, both with the changes of one
    capture.

    Args:
        selection: Settings of this capture that differ.
        role: The role.
        override: The role's own settings.
        select: The selection of all roles.
        tools: Names of the role's tools.

    Raises:
        ConfigError: The selection contradicts itself.
    """
    if selection.stages is not None and selection.mode == "e2e":
        raise ConfigError(
            "stages", "are recorded separately only in discrete mode, but mode is e2e"
        )
    changes: dict[str, Any] = {}
    if selection.roles is not None:
        changes["enable"] = role in selection.roles
        select = replace(select, roles=None)
    if selection.stages is not None:
        changes["stages"] = selection.stages
        if role == ROLLOUT_ROLE and _ROLLOUT_STAGE not in selection.stages:
            changes["enable"] = False
    changes |= _recording(selection, role, tools)
    by_replica = role == ROLLOUT_ROLE and selection.replicas is not None
    if by_replica or selection.ranks is not None:
        select = Selection(roles=select.roles, stages=select.stages)
        changes |= dict.fromkeys(_DIMENSIONS)
        changes["ranks"] = None if by_replica else selection.ranks
        changes["replicas"] = selection.replicas
    return replace(override, **changes), select


def _recording(selection: CaptureSelection, role: str, tools: tuple[str, ...]) -> dict[str, Any]:
    """Return the changes of mode and tools; roles with trajectories change only on request."""
    if TRAJECTORIES in tools and role not in (selection.roles or ()):
        return {}
    changes: dict[str, Any] = {}
    if selection.mode is not None:
        changes["mode"] = selection.mode
    elif selection.stages is not None:
        changes["mode"] = "discrete"
    if selection.tools is not None:
        kept = {TRAJECTORIES} & set(tools) - set(selection.tools)
        changes["tool"] = (*selection.tools, *kept)
    return changes


def choose(override: RoleOverride, common: Selection, key: str) -> dict[str, Any]:
    """Return ranks, replicas, coordinates and stages of a role, from its own settings, else from
    ``select``.

    Args:
        override: The role's settings.
        common: The settings ``select``.
        key: Key of the role's settings with a dot, for errors.

    Raises:
        ConfigError: A value is not valid as ranks.
    """

    def chosen(name: str) -> tuple[Any, str]:
        value = getattr(override, name)
        if value is not None:
            return value, f"{key}{name}"
        return getattr(common, name), f"select.{name}"

    coordinates = {}
    for dimension in _DIMENSIONS:
        indices = coordinates_in(*chosen(dimension))
        if indices is not None:
            coordinates[dimension] = indices
    ranks, ranks_key = chosen("ranks")
    if ranks == _ONE_PER_PP_STAGE:
        ranks = None
        coordinates = {name: frozenset({0}) for name in _DIMENSIONS if name != "pp"} | coordinates
    stages, _ = chosen("stages")
    return {
        "stages": None if stages is None else frozenset(stages),
        "ranks": parse_ranks(ranks, ranks_key),
        "replicas": parse_ranks(*chosen("replicas")),
        "coordinates": coordinates,
    }
