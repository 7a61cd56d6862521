"""Which workers take part: how users choose them, and whether a worker is chosen."""

from __future__ import annotations

from dataclasses import dataclass, fields

from verl_profiling.ranks import Ranks, coordinates_in, parse_ranks

__all__ = ["ONE_PER_PP_STAGE", "Chosen", "Coordinates", "Selection", "choose"]

ONE_PER_PP_STAGE = "one_per_pp_stage"
"""In place of ranks: the first rank of each pipeline stage."""


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Ranks chosen by their coordinates in the parallel dimensions; ``None`` means all.

    Written like ``ranks``, where -1 is the last: ``pp: [0, -1]``. A dimension that a worker does not
    have does not restrict it.

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
    """The roles, ranks and stages that are captured. ``None`` means all.

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
class Chosen:
    """The ranks of one role that take part. ``None`` means all.

    Attributes:
        ranks: Global ranks inside the role.
        replicas: Rollout replicas.
        coordinates: Coordinates by dimension; negative ones count from the end.
    """

    ranks: frozenset[int] | None
    replicas: frozenset[int] | None
    coordinates: dict[str, frozenset[int]]


def choose(own: Coordinates, common: Selection, key: str) -> Chosen:
    """Return what a role chose itself and, where it did not, what all roles have in common.

    Args:
        own: The role's settings.
        common: The settings ``select``.
        key: Key of the role's settings with a dot, for errors.

    Raises:
        ConfigError: A choice is not written as ranks are.
    """

    def chosen(name: str) -> tuple[Ranks, str]:
        value = getattr(own, name)
        return (value, f"{key}{name}") if value is not None else (getattr(common, name), f"select.{name}")

    coordinates = {
        dimension: indices
        for dimension in _DIMENSIONS
        if (indices := coordinates_in(*chosen(dimension))) is not None
    }
    ranks, ranks_key = chosen("ranks")
    if ranks == ONE_PER_PP_STAGE:
        ranks = None
        coordinates = {name: frozenset({0}) for name in _DIMENSIONS if name != "pp"} | coordinates
    return Chosen(
        ranks=parse_ranks(ranks, ranks_key),
        replicas=parse_ranks(*chosen("replicas")),
        coordinates=coordinates,
    )
