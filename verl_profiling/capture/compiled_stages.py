"""Stages inside functions that ``torch.compile`` compiles: they are not recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

logger = logging.getLogger(__name__)


def replace_in_graphs(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Let ``torch.compile`` trace another function in place of a function.

    Dynamo reads ``_torchdynamo_inline`` (seen in torch 2.13 and 2.14), so nothing here has to
    import torch. A traced stage reads no state: a graph is compiled once, whatever is recorded, as
    with ``record_function``.
    """
    original._torchdynamo_inline = replacement  # type: ignore[attr-defined]


_dropped: set[str] = set()
"""Names of stages in compiled functions that were logged as not recorded."""


def _log_dropped(name: str) -> None:
    """Log, once per name, that a stage inside a compiled function is not recorded."""
    if name not in _dropped:
        _dropped.add(name)
        logger.warning(
            "stage %r is inside a function that torch.compile compiles, and so is not recorded; "
            "write the stage around the compiled call",
            name,
        )


_log_dropped._dynamo_marked_constant = True  # type: ignore[attr-defined]  # called while Dynamo traces


class _StageInGraph(nullcontext[None]):
    """Replaces a stage in a compiled function, and records nothing."""

    def given(self, **facts: object) -> _StageInGraph:
        """Ignore the amount of work."""
        return self


def stage_in_graph(name: str) -> AbstractContextManager[None]:
    """Return a context manager that records nothing, for ``stage(name)`` in a compiled function."""
    _log_dropped(name)
    return _StageInGraph()


def begin_in_graph(stage: Any) -> None:
    """Begin a stage in a compiled function: log that it is not recorded."""
    _log_dropped(stage.name)


def end_in_graph(
    stage: Any, kind: object = None, error: object = None, trace: object = None
) -> None:
    """End a stage in a compiled function."""
