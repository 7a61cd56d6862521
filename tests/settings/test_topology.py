"""Selecting workers by their place in the parallel dimensions, and naming them by it."""

from __future__ import annotations

from itertools import product
from typing import Any

from verl_profiling import ProfilingConfig
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.roles import RoleConfig

SIZES = {"tp": 2, "pp": 4, "dp": 2}


def role(select: dict[str, Any], **roles: Any) -> RoleConfig:
    config = ProfilingConfig.from_any(
        {"enable": True, "tool": "spans", "select": select, "roles": roles}
    )
    return config.for_role("actor")


def chosen(settings: RoleConfig) -> list[tuple[int, ...]]:
    """Return the (tp, pp, dp) of all workers that take part, of 16."""
    places = product(range(SIZES["tp"]), range(SIZES["pp"]), range(SIZES["dp"]))
    return [
        place
        for rank, place in enumerate(places)
        if settings.selects(rank, None, dict(zip(SIZES, place, strict=True)), SIZES)
    ]


def test_workers_are_chosen_by_their_place() -> None:
    """Numbers, lists, ranges and a named choice, which a coordinate moves."""
    assert chosen(role({"pp": [0, -1], "tp": [0]})) == [(0, 0, 0), (0, 0, 1), (0, 3, 0), (0, 3, 1)]
    assert chosen(role({"ranks": "one_per_pp_stage"})) == [(0, pp, 0) for pp in range(4)]
    assert chosen(role({"ranks": "one_per_pp_stage", "dp": 1})) == [(0, pp, 1) for pp in range(4)]
    assert chosen(role({"pp": "1-2"})) == chosen(role({"pp": [1, 2]}))
    assert chosen(role({"pp": 0})) == chosen(role({"pp": [-4]}))
    settings = role({"pp": [0], "tp": [0]}, actor={"pp": [3]})
    assert chosen(settings) == [(0, 3, 0), (0, 3, 1)]
    settings = role({"pp": [0, -1], "ranks": "one_per_pp_stage"})
    assert settings.selects(5)
    assert settings.selects(0, None, {"dp": 0}, {"dp": 2})


def test_the_name_shows_how_the_model_is_split() -> None:
    """Coordinates of dimensions with several ranks are in the name, data-parallel ones are not."""
    identity = WorkerIdentity(
        role="actor",
        rank=3,
        topology={"tp": 1, "pp": 1, "cp": 0, "dp": 1},
        sizes={**SIZES, "cp": 1},
    )
    assert identity.name == identity.lane() == "actor_rank3_tp1_pp1"
    assert (
        WorkerIdentity(role="actor", rank=3, topology={"dp": 3}, sizes={"dp": 4}).name
        == "actor_rank3"
    )
