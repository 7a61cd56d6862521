"""A step's tables as pandas data frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.report.flat_rows import columns, flat_rows

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["data_frame"]

_DTYPES: dict[Any, str] = {
    bool: "bool",
    int: "int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
}


def data_frame(
    kind: type[msgspec.Struct], tables: Iterable[tuple[int | None, Iterable[msgspec.Struct]]]
) -> DataFrame:
    """Return rows as a data frame, with the same columns and types when there are none.

    Args:
        kind: What a row is.
        tables: The rows of each step, with its number, which is the first column.

    Raises:
        ToolUnavailableError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ToolUnavailableError(
            f"to_frame needs {error.name}: pip install 'verl-profiling[analysis]', or use report()"
        ) from error
    types = columns(kind)
    records = [record for step, rows in tables for record in flat_rows(step, rows)]
    frame = pandas.DataFrame.from_records(records, columns=list(types))
    return frame.astype({name: _DTYPES[kind] for name, kind in types.items() if kind in _DTYPES})
