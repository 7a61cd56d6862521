"""What loops hand over besides workers: a captured step takes whatever another step takes."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from test_callback import configured, following, manifest

from verl_profiling import ProfilingCallback
from verl_profiling.capture.session import Session


class Hostile:
    """A value or a name that raises on every operation."""

    def __float__(self) -> float:
        raise AttributeError("lazy")

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Broken(dict[str, float]):
    def items(self) -> Any:
        raise KeyError("lost")


ODD: dict[Any, Any] = {
    "plain": 1,
    7: 2.5,
    None: 3,
    ("a", 1): 4,
    "numpy": numpy.float32(0.5),
    "numpy int": numpy.int64(6),
    "torch": torch.tensor(7),
    "fraction": Fraction(1, 4),
    "\udcff": 8,
    "text": "9",
    "bytes": b"10",
    "vector": torch.ones(2),
    "array": numpy.ones(2),
    "nothing": None,
    "huge": 10**400,
    "list": [1],
    "hostile": Hostile(),
    Hostile(): 11,
    "nan": math.nan,
    "infinite": -math.inf,
    "torch nan": torch.tensor(math.nan),
}


def test_numbers_are_kept_and_what_is_not_finite_is_named(tmp_path: Path, session: Session) -> None:
    """Names become text; values that are not numbers are left out."""
    config = configured(tmp_path)
    callback = following(config)
    callback.on_step_begin(2)
    callback.on_step_end(ODD)
    assert manifest(config).metrics == {
        "plain": 1.0,
        "7": 2.5,
        "None": 3.0,
        "('a', 1)": 4.0,
        "numpy": 0.5,
        "numpy int": 6.0,
        "torch": 7.0,
        "fraction": 0.25,
        "?": 8.0,
    }
    assert manifest(config).notes == [
        "metrics that are not finite were left out: nan is nan, infinite is -inf, torch nan is nan"
    ]


@pytest.mark.parametrize("metrics", [[1, 2], numpy.ones(3), "loss", 3, Broken(), Hostile()])
@pytest.mark.parametrize("strict", [False, True])
def test_metrics_of_any_kind_never_end_training(
    tmp_path: Path, session: Session, metrics: Any, strict: bool
) -> None:
    """The step is captured and whole, and a note names what was handed over."""
    config = configured(tmp_path, strict=strict)
    callback = following(config)
    with callback:
        for step in range(1, 4):
            callback.on_step_begin(step)
            callback.on_rollout_begin()
            callback.on_rollout_end(metrics)
            callback.on_step_end(metrics)
            callback.add_metrics(step, metrics)
    written = manifest(config)
    assert (written.complete, written.metrics) == (True, {})
    assert written.notes
    assert all(type(metrics).__name__ in note for note in written.notes)


@pytest.mark.parametrize("number", [numpy.int64(2), torch.tensor(2), True + 1])
def test_whole_numbers_of_any_type_are_steps(tmp_path: Path, session: Session, number: Any) -> None:
    config = configured(tmp_path)
    callback = following(config)
    callback.on_step_begin(number, number)
    callback.on_step_end()
    assert (manifest(config).step, manifest(config).policy_version) == (2, 2)


@pytest.mark.parametrize("step", ["2", 2.0, None, [2]])
@pytest.mark.parametrize("schedule", [{"steps": [2]}, {"every": 2}, {"wait": 1}])
def test_a_step_that_is_no_whole_number_is_refused_on_every_step_alike(
    tmp_path: Path, step: Any, schedule: dict[str, Any]
) -> None:
    """With a sentence, not only where the schedule happens to compare it."""
    callback = ProfilingCallback(configured(tmp_path, schedule=schedule))
    with pytest.raises(TypeError, match=f"a step is a whole number, not {type(step).__name__}"):
        callback.on_step_begin(step)


def test_a_policy_version_that_is_no_number_is_noted(tmp_path: Path, session: Session) -> None:
    """The step is captured without it; in other steps it is not looked at."""
    config = configured(tmp_path, strict=True)
    callback = following(config)
    for step in (1, 2):
        callback.on_step_begin(step, "v3")  # type: ignore[arg-type]
        callback.on_step_end()
    written = manifest(config)
    assert written.policy_version is None
    assert written.notes == ["policy_version is a str, not a whole number: left out"]
