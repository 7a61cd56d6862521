"""The rows of a report without nesting, for CSV files and data frames.

A new column of a table belongs in :mod:`~verl_profiling.report.rows`; it appears here by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec

from verl_profiling.report.asked import SuspectRow
from verl_profiling.report.lost import CAUSES
from verl_profiling.report.model import OTHER_RANKS, Report
from verl_profiling.report.rollout.rows import (
    BlockRow,
    CallRow,
    CauseRow,
    FailureRow,
    FateRow,
    GroupRow,
    PartRow,
    VersionRow,
)
from verl_profiling.report.rows import (
    AnchorRow,
    CollectiveRow,
    CostRow,
    CounterRow,
    DeviceRow,
    EngineRow,
    KernelRow,
    LostRow,
    MeasureRow,
    OutsideRow,
    ReplicaRow,
    StageRow,
    StragglerRow,
    WorkerRow,
)

__all__ = ["REPORT_TABLES", "columns", "flat_rows", "rows_of"]

REPORT_TABLES: Mapping[str, type[msgspec.Struct]] = {
    "suspects": SuspectRow,
    "stages": StageRow,
    "outside": OutsideRow,
    "workers": WorkerRow,
    "devices": DeviceRow,
    "engines": EngineRow,
    "replicas": ReplicaRow,
    "lost": LostRow,
    "stragglers": StragglerRow,
    "collectives": CollectiveRow,
    "kernels": KernelRow,
    "measures": MeasureRow,
    "counters": CounterRow,
    "costs": CostRow,
    "anchors": AnchorRow,
    "trajectory_causes": CauseRow,
    "trajectory_calls": CallRow,
    "trajectory_fates": FateRow,
    "trajectory_failures": FailureRow,
    "trajectory_groups": GroupRow,
    "trajectory_versions": VersionRow,
    "loop_blocks": BlockRow,
    "rollout_time": PartRow,
}
"""The tables of a report, and the types of their rows."""

_PLACES = {
    "trajectory_causes": "causes",
    "trajectory_calls": "calls",
    "trajectory_fates": "fates",
    "trajectory_failures": "failures",
    "trajectory_groups": "groups",
    "trajectory_versions": "versions",
    "loop_blocks": "blocks",
    "rollout_time": "time",
}
"""The tables that are fields of the section on the rollout."""

_CURVES = ("load", "communication_load", "waiting_load")
_LOST = {cause: f"lost_{cause}_us" for cause in (*CAUSES, OTHER_RANKS)}


def rows_of(report: Report, table: str) -> Sequence[msgspec.Struct]:
    """Return the rows of one of the tables of a report."""
    place = _PLACES.get(table)
    found: Sequence[msgspec.Struct] = getattr(report.rollout if place else report, place or table, [])
    return found


def columns(row: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the columns of a table with their types: the step, then the fields that are plain values.

    ``lost_us`` of a worker becomes one column for each cause, and its traces one text.
    """
    found: dict[str, Any] = {"step": int | None}
    for name, kind in get_type_hints(row).items():
        if name == "lost_us":
            found |= dict.fromkeys(_LOST.values(), float)
        elif name not in _CURVES:
            found[name] = str if kind in (list[str], dict[str, float]) else kind
    return found


def flat_rows(step: int | None, rows: Iterable[msgspec.Struct]) -> Iterable[dict[str, Any]]:
    """Yield the rows of one table, with the columns that :func:`columns` names."""
    for row in rows:
        fields = msgspec.structs.asdict(row)
        for curve in _CURVES:
            fields.pop(curve, None)
        lost = fields.pop("lost_us", None) or {}
        for name, value in fields.items():
            fields[name] = _plain(value)
        yield {"step": step, **fields, **{column: lost[cause] for cause, column in _LOST.items() if lost}}


def _plain(value: Any) -> Any:
    """Return a value as it stands in one cell: names one after the other, parts with their seconds."""
    if isinstance(value, dict):
        return "; ".join(f"{name} {seconds:.6g}" for name, seconds in value.items())
    return "; ".join(value) if isinstance(value, list) else value
