"""The changes that a user can ask for with ``what-if``: their values, options and assumptions.

A new change is a field of :class:`Changes` and of :class:`ChangeKeywords`, and its row of
:data:`CHANGES`; the command and ``CapturedStep.what_if`` take all fields. Its effect is in
:mod:`verl_profiling.predict.change_effects`; of other resources, it is replayed in
:mod:`verl_profiling.predict.replicas`. ``predict/prediction.py`` may offer it as a change that
would help.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, TypedDict

import msgspec

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.predict.kernels import KERNEL

TOOL = "tool:"
"""Prefix of the name of a tool's spans, e.g. ``tool:search``; changes have the name without it."""


class ChangeKeywords(TypedDict, total=False):
    """The fields of :class:`Changes` as keywords of a call; ``None`` for no change."""

    scale: Mapping[str, float] | None
    balance: Sequence[str] | None
    no_tail: float | None
    tools: Mapping[str, float | str] | None
    unblock: Sequence[str] | None
    replicas: int | None
    concurrency: int | None
    steps_ahead: int | None


class Change(NamedTuple):
    """A kind of change: the option of a field of :class:`Changes`.

    Attributes:
        option: Name of the option.
        values: Kind of its value.
        help: Description of the option.
        check: Raises for a value that no step has, given the option and the value.
        assumed: Sentence on what is assumed with the change; empty for none.
        unit: Unit of a number of a mapping, as users write it.
        of_resources: Whether the step is replayed on other resources, in ``predict/replicas.py``.
    """

    option: str
    values: str
    help: str
    check: Callable[[str, Any], None]
    assumed: str = ""
    unit: str = ""
    of_resources: bool = False


def _check(holds: bool, option: str, problem: str) -> None:
    if not holds:
        raise ConfigError(option, problem)


def _names(option: str, names: Any) -> None:
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    _check(is_list, option, f"{names!r} is no list of names, such as ['search']")


def _numbers(option: str, values: Any) -> None:
    example = "0.2 (s)" if option == "--tools" else "0.5"
    is_mapping = isinstance(values, Mapping)
    _check(is_mapping, option, f"{values!r} is no mapping; give {{'name': {example}}}")
    for name, value in values.items():
        factor = factor_of(value) if option == "--tools" else None
        number = value if factor is None else factor
        is_finite = isinstance(number, Real) and 0 <= float(number) < math.inf
        problem = f"{name}={value!r} is not a finite number of at least 0, such as {example}"
        _check(is_finite, option, problem)


def _percentage(option: str, tail: Any) -> None:
    is_percentage = tail is None or (isinstance(tail, Real) and 0 < float(tail) <= 100)
    _check(is_percentage, option, f"{tail!r} is not a percentage above 0 and at most 100")


def _count(option: str, count: Any) -> None:
    is_count = count is None or (isinstance(count, Integral) and int(count) >= 1)
    _check(is_count, option, f"{count!r} is not an integer of at least 1")


def _is_ahead(option: str, ahead: Any) -> None:
    _check(ahead in (None, 0, 1), option, f"{ahead!r} is not 0 or 1")


def factor_of(value: object) -> float | None:
    """Return the factor that a text such as ``0.5x`` gives; ``None`` for anything else."""
    match = re.fullmatch(r"(\d+(\.\d*)?|\.\d+)x", value) if isinstance(value, str) else None
    return float(match[1]) if match else None


CHANGES = {
    "scale": Change(
        "--scale",
        "STAGE=FACTOR,...",
        "stages, or kernels (e.g. kernel:*gemm*=0.5), take this part of their time",
        _numbers,
        "a scaled stage has the same shape, with its own delays and waits",
    ),
    "balance": Change(
        "--balance",
        "A,B",
        "each of these stages takes the mean of its workers on each of them",
        _names,
        "a balanced stage takes the mean of its workers, who still do the same work in all",
    ),
    "no_tail": Change(
        "--no-tail",
        "PERCENT",
        "a rollout ends when this many of its trajectories, else requests, have ended",
        _percentage,
        "a rollout without its tail is followed by stages that take as long as before",
    ),
    "tools": Change(
        "--tools",
        "NAME=TIME,...",
        "each call of a tool takes this time, or this factor of it: search=0.2s,sandbox=0.5x",
        _numbers,
        "other calls take as long as before a tool changed, also in a fuller engine",
        unit="s",
    ),
    "unblock": Change(
        "--unblock",
        "A,B",
        "these tools no longer block the event loop of their agent loop",
        _names,
        "calls take as long as before in threads of their own, however many at once",
    ),
    "replicas": Change(
        "--replicas",
        "NUMBER",
        "the requests of the rollout are served by this many replicas; prints an interval",
        _count,
        of_resources=True,
    ),
    "concurrency": Change(
        "--concurrency",
        "NUMBER",
        "a replica runs at most this many requests at once; prints an interval",
        _count,
        of_resources=True,
    ),
    "steps_ahead": Change(
        "--async",
        "STEPS",
        "1: the next rollout runs beside the training; prints an interval",
        _is_ahead,
        "rollout and training run side by side as fast as alone, and neither runs in a weight "
        "update",
        of_resources=True,
    ),
}
"""The kind of each field of :class:`Changes`."""
_KERNELS = "code of the host, gaps and other kernels take as long as before"


class Changes(msgspec.Struct, frozen=True):
    """Changes of a step.

    Attributes:
        scale: Factor of the time in a stage, such as ``{"rollout": 0.5}``, or of kernels by a
            pattern of their names: ``{"kernel:*gemm*": 0.5}``.
        balance: Stages in which each worker takes the mean time of all. With ``=work``, each gets
            the mean work, and with ``=longest-first``, the runs are dealt anew.
        no_tail: Percentage of trajectories (else requests) after which a rollout ends.
        tools: Duration of each call of a tool (s), or its factor as text, e.g. ``0.5x``.
        unblock: Tools and spans that no longer block the event loop.
        replicas: Number of replicas of the rollout engine.
        concurrency: Most requests that a replica runs at once; more wait in its queue.
        steps_ahead: Steps that a rollout is ahead of the training, on devices of its own: 0 or 1.

    Raises:
        ConfigError: A value has a wrong type, or is a number that no step has.
    """

    scale: Mapping[str, float] = {}
    balance: Sequence[str] = ()
    no_tail: float | None = None
    tools: Mapping[str, float | str] = {}
    unblock: Sequence[str] = ()
    replicas: int | None = None
    concurrency: int | None = None
    steps_ahead: int | None = None

    def __post_init__(self) -> None:
        for field, change in CHANGES.items():
            change.check(change.option, getattr(self, field))

    @property
    def has_resources(self) -> bool:
        """Whether the step is to run on other resources."""
        fields = [field for field, change in CHANGES.items() if change.of_resources]
        return any(getattr(self, field) is not None for field in fields)

    def options(self) -> list[str]:
        """Return the changes as options of the command."""
        options = []
        for field, change in CHANGES.items():
            for text in _texts(getattr(self, field), change.unit):
                options.append(f"{change.option} {shlex.quote(text)}")
        return options

    def with_more(self, more: Changes) -> Changes:
        """Return these changes and more; factors of one stage are multiplied,
        and other values replaced.
        """
        scale, tools = {**self.scale}, {**self.tools}
        for name, factor in more.scale.items():
            scale[name] = scale.get(name, 1.0) * factor
        for name, value in more.tools.items():
            tools[name] = self._tool(name, value)
        return msgspec.structs.replace(
            self,
            scale=scale,
            balance=list(dict.fromkeys((*self.balance, *more.balance))),
            no_tail=self.no_tail if more.no_tail is None else more.no_tail,
            tools=tools,
            unblock=list(dict.fromkeys((*self.unblock, *more.unblock))),
        )

    def _tool(self, name: str, value: float | str) -> float | str:
        """Return a tool's value after one more change: ``0.5x`` multiplies, and seconds replace."""
        factor, before = factor_of(value), self.tools.get(name, "1x")
        if factor is None:
            return value
        factor_before = factor_of(before)
        return float(before) * factor if factor_before is None else f"{factor_before * factor:.6g}x"

    @property
    def kernels(self) -> dict[str, float]:
        """Scale factor of kernels, by the pattern of their names."""
        scale = self.scale.items()
        return {name[len(KERNEL) :]: by for name, by in scale if name.startswith(KERNEL)}

    def assumed(self) -> list[str]:
        """Return a sentence on the assumption of each kind of change."""
        sentences = []
        for field, change in CHANGES.items():
            value = getattr(self, field)
            if field == "scale":
                value = self.scale.keys() - {f"{KERNEL}{name}" for name in self.kernels}
            if value and change.assumed:
                sentences.append(change.assumed)
        return [*sentences, _KERNELS] if self.kernels else sentences


def _texts(value: Any, unit: str) -> Iterator[str]:
    """Yield the value of a field as values of its option, one of each name."""
    if isinstance(value, Mapping):
        for name, number in value.items():
            text = number if isinstance(number, str) else f"{number:.6g}{unit}"
            yield f"{name}={text}"
    elif isinstance(value, Sequence):
        for name in value:
            yield name.replace(",", "\\,")  # as an item of a list
    elif value is not None:
        yield f"{value:.6g}" if isinstance(value, float) else str(value)


def tool_name(name: str) -> str:
    """Return the name of a span as users give it: of a tool, without ``tool:``."""
    return name.removeprefix(TOOL)


def check_name(option: str, what: str, name: str, choices: Iterable[str]) -> None:
    """Refuse a name that the step does not have.

    Args:
        option: The option with the name.
        what: The named thing in words, such as ``stage 'rollout'``.
        name: The name.
        choices: Names that the step has.
    """
    names = set(choices)
    if name not in names:
        hint = choices_hint(name, names) if names else "it has none of any name"
        raise ConfigError(option, f"the step has no {what}; {hint}")
