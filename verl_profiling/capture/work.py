"""The amount of work of a stage (samples, tokens, ...), as user code passes it to ``Stage.given``.

Wrong values are left out, and logged once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiling.manifest import MOST_WORK, Work

logger = logging.getLogger(__name__)

_LEARNED = {"masks": "masked_tokens", "advantages": "equal_tokens"}
"""Fields of a work by the list that they come from. A sequence counts once, in the first one."""
_logged: set[tuple[str, str]] = set()
"""The logged problems: name of the stage, and name of the value that was left out."""


def work_from(
    stage: str, facts: Mapping[str, Any], lengths: Iterable[object] | None
) -> Work | None:
    """Return the amount of work of a stage; ``None`` without any usable value. Never raises.

    Args:
        stage: Name of the stage, for messages.
        facts: Numbers by name, e.g. ``{"tokens": 512}``; ``None`` for an unknown number. ``masks``
            and ``advantages`` have a number for each sequence: zero if nothing is learned from it.
        lengths: Lengths of the sequences, if they are known.
    """
    known: dict[str, int] = {}
    for name, value in facts.items():
        if value is not None and name not in _LEARNED:
            try:
                known[name] = _count(value)
            except Exception as error:
                _leave_out(stage, name, error)
    counts: list[int] = []
    if lengths is not None:
        try:
            counts = [_count(length) for length in _listed(lengths)]
            of_lengths = _sums(counts)
            _check(of_lengths, known)
            known |= of_lengths
        except Exception as error:
            _leave_out(stage, "lengths", error)
    left = dict(enumerate(counts))
    for name, field in _LEARNED.items():
        numbers = facts.get(name)
        if numbers is not None:
            try:
                known[field] = sum(left.pop(at, 0) for at in _zeros(numbers, len(counts)))
            except Exception as error:
                _leave_out(stage, name, error)
    return Work(**known) if known else None


def _listed(values: Iterable[object]) -> Iterable[object]:
    """Return the values of a list, array or tensor; of a device, they are copied once."""
    as_list = getattr(values, "tolist", None)
    return values if as_list is None else as_list()


def _sums(counts: Sequence[int]) -> dict[str, int]:
    """Return number, sum and sum of squares of the lengths of sequences."""
    squares = sum(length * length for length in counts)
    return {"samples": len(counts), "tokens": sum(counts), "tokens_squared": _count(squares)}


def _zeros(values: Iterable[object], many: int) -> list[int]:
    """Return which of so many sequences have zero; raise if there are other numbers."""
    numbers = [float(value) for value in _listed(values)]  # type: ignore[arg-type]
    if len(numbers) != many or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{len(numbers)} of them, and {many} lengths, or one is not finite")
    return [at for at, number in enumerate(numbers) if not number]


def _check(of_lengths: Mapping[str, int], known: Mapping[str, int]) -> None:
    """Refuse lengths that contradict a number that was passed, too."""
    for name, value in of_lengths.items():
        if known.get(name, value) != value:
            raise ValueError(f"they give {value} {name}, and {name}={known[name]} was passed too")


def _count(value: object) -> int:
    """Return a value as a whole number; raise if it is no number, negative or too large."""
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or not 0 <= number <= MOST_WORK:
        raise ValueError(f"{number} is no number of anything")
    return int(number)


def _leave_out(stage: str, name: str, error: Exception) -> None:
    """Log once that a value is not recorded."""
    if (stage, name) not in _logged:
        _logged.add((stage, name))
        logger.warning("stage %r: %s is left out of its work: %s", stage, name, error)
