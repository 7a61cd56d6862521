"""The amount of work of a stage (samples, tokens, ...), as user code passes it to ``Stage.given``.

Wrong values are left out, and logged once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_profiling.files.step_summary import OTHERS
from verl_profiling.files.trajectory_log import EQUAL
from verl_profiling.manifest import MOST_TASKS, MOST_WORK, Lessons, Work
from verl_profiling.units import shortened

logger = logging.getLogger(__name__)

_NONZERO = {"masks": "masked", "advantages": EQUAL}
"""Reason by the list of numbers in which a sequence has zero."""
_LESSONS = ("reasons", *_NONZERO)
"""Lists with a reason for each sequence; the first one that has a reason counts."""
_logged: set[tuple[str, str]] = set()
"""The logged problems: name of the stage, and name of the value that was left out."""


def work_from(
    stage: str, facts: Mapping[str, Any], lengths: Iterable[object] | None
) -> Work | None:
    """Return the amount of work of a stage; ``None`` without any usable value. Never raises.

    Args:
        stage: Name of the stage, for messages.
        facts: Numbers by name, e.g. ``{"tokens": 512}``; ``None`` for an unknown number. Lists with
            an item for each sequence are ``masks``, ``advantages``, ``reasons`` and ``tasks``, as
            of :meth:`~verl_profiling.capture.stage_spans.Stage.given`.
        lengths: Lengths of the sequences, if they are known.
    """
    known: dict[str, Any] = {}
    for name, value in facts.items():
        if value is not None and name not in (*_LESSONS, "tasks"):
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
    lessons = _lessons(stage, facts, counts)
    if lessons:
        known["lessons"] = lessons
    return Work(**known) if known else None


def _lessons(stage: str, facts: Mapping[str, Any], counts: Sequence[int]) -> Lessons:
    """Return the tokens by task and reason; empty if no list says what is learned."""
    lists: dict[str, list[str]] = {}
    for name in ("tasks", *_LESSONS):
        if facts.get(name) is not None:
            try:
                lists[name] = _texts(name, facts[name], len(counts))
            except Exception as error:
                _leave_out(stage, name, error)
    unknown = [""] * len(counts)
    tasks = lists.pop("tasks", unknown)
    lessons: Lessons = {}
    if not lists:
        return lessons
    causes = unknown
    for of_list in lists.values():
        causes = [cause or new for cause, new in zip(causes, of_list, strict=True)]
    for length, task, cause in zip(counts, tasks, causes, strict=True):
        if task not in lessons and len(lessons) >= MOST_TASKS:
            task = OTHERS
        of_task = lessons.setdefault(task, {})
        of_task[cause] = of_task.get(cause, 0) + length
    return lessons


def _texts(name: str, values: Iterable[object], many: int) -> list[str]:
    """Return a text for each of ``many`` sequences: the task, or why nothing is learned from it."""
    if name in _NONZERO:
        texts = ["" if number else _NONZERO[name] for number in _numbers(values)]
    else:
        names = [*_listed(values)]
        text_of = {name: _text(name) for name in dict.fromkeys(names)}
        texts = [text_of[name] for name in names]
    if len(texts) != many:
        raise ValueError(f"{len(texts)} of them, and {many} lengths")
    return texts


def _listed(values: Iterable[object]) -> Iterable[object]:
    """Return the values of a list, array or tensor; values on a device are copied once."""
    as_list = getattr(values, "tolist", None)
    return values if as_list is None else as_list()


def _sums(counts: Sequence[int]) -> dict[str, int]:
    """Return number, sum and sum of squares of the lengths of sequences."""
    squares = sum(length * length for length in counts)
    return {"samples": len(counts), "tokens": sum(counts), "tokens_squared": _count(squares)}


def _text(value: object) -> str:
    """Return a name that can be written as UTF-8; empty for ``None``."""
    return "" if value is None else shortened(str(value)).encode("utf-8", "replace").decode()


def _numbers(values: Iterable[object]) -> list[float]:
    """Return the values as numbers; raise if one is not finite."""
    numbers = [float(value) for value in _listed(values)]  # type: ignore[arg-type]
    if not all(map(math.isfinite, numbers)):
        raise ValueError("one of them is not finite")
    return numbers


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
