"""The settings ``select``, ``roles``, ``limits`` and ``model``: who records what, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from verl_profiling.capture_request import CaptureSelection, Ranks, coordinates_in, parse_ranks
from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.tools import TOOLS, Tool
from verl_profiling.typed_values import Positive, Size

Mode = Literal["e2e", "discrete"]
TRAJECTORIES = "trajectories"
_GB = Size(1_000_000_000)
_ROLLOUT_STAGE = "rollout"
_ONE_PER_PP_STAGE = "one_per_pp_stage"
"""Text in place of ranks, for the first rank of each pipeline stage."""
_PASS = "pass the model's folder, or model.config.to_dict()"


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


def model_sizes(model: str | Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the plain values of a model's Hugging Face configuration.

    Args:
        model: The configuration, a ``config.json``, a folder with one, or the name of a model in
            the local cache of Hugging Face; nothing is downloaded.
        key: Key of the setting, for errors.

    Raises:
        ConfigError: There is no such configuration on this host.
    """
    if isinstance(model, str):
        file = _file_of(model)
        try:
            model = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(key, f"{file} cannot be read: {error}; {_PASS}") from None
    return {name: _plain(value) for name, value in model.items() if _plain(value) is not None}


def _file_of(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(model, "config.json")
        except Exception:  # the library is missing, or the name is no valid one
            cached = None
        if isinstance(cached, str):
            return Path(cached)
    return path / "config.json"


def _plain(value: object) -> object:
    """Return a number, a text, or a list of numbers; ``True`` for any other setting that is set."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple) and all(isinstance(item, int) for item in value):
        return list(value)
    return True if value else None
