"""The changes that a user can ask for with ``what-if``: their values, options and assumptions.

A new change is a field of :class:`Changes`, with its check, its option and its assumption. Its
effect is in :mod:`verl_profiling.predict.change_effects`. The command and
``CapturedStep.what_if`` take all fields. ``predict/prediction.py`` may offer it as a change that
would help. Other resources are replayed in :mod:`verl_profiling.predict.replicas`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.predict.kernels import KERNEL

TOOL = "tool:"
"""Prefix of the name of a tool's spans, e.g. ``tool:search``; changes have the name without it."""
OPTIONS = {
    "scale": (
        "--scale STAGE=FACTOR,...",
        "stages, or kernels (e.g. kernel:*gemm*=0.5), take this part of their time",
    ),
    "balance": (
        "--balance A,B",
        "each of these stages takes the mean of its workers on each of them",
    ),
    "no_tail": (
        "--no-tail PERCENT",
        "a rollout ends when this many of its trajectories, else requests, have ended",
    ),
    "tools": (
        "--tools NAME=TIME,...",
        "each call of a tool takes this time, or this factor of it: search=0.2s,sandbox=0.5x",
    ),
    "unblock": (
        "--unblock A,B",
        "these tools no longer block the event loop of their agent loop",
    ),
    "replicas": (
        "--replicas NUMBER",
        "the requests of the rollout are served by this many replicas; prints an interval",
    ),
    "concurrency": (
        "--concurrency NUMBER",
        "a replica runs at most this many requests at once; prints an interval",
    ),
    "steps_ahead": (
        "--async STEPS",
        "1: the next rollout runs beside the training; prints an interval",
    ),
}
"""The option of each field of :class:`Changes`: name with the kind of its value, and help."""
_ASSUMED = (
    "a scaled stage has the same shape, with its own delays and waits",
    "code of the host, gaps and other kernels take as long as before",
    "a balanced stage takes the mean of its workers, who still do the same work in all",
    "a rollout without its tail is followed by stages that take as long as before",
    "other calls take as long as before a tool changed, also in a fuller engine",
    "calls take as long as before in threads of their own, however many at once",
    "rollout and training run side by side as fast as alone, and neither runs in a weight update",
)


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
        for option, names in (("--balance", self.balance), ("--unblock", self.unblock)):
            is_list = isinstance(names, Sequence) and not isinstance(names, str)
            _check(is_list, option, f"{names!r} is no list of names, such as ['search']")
        _check_numbers("--scale", self.scale, "0.5")
        _check_numbers("--tools", self.tools, "0.2 (s)")
        tail, ahead = self.no_tail, self.steps_ahead
        is_percentage = tail is None or (isinstance(tail, Real) and 0 < tail <= 100)
        _check(is_percentage, "--no-tail", f"{tail!r} is not a percentage above 0 and at most 100")
        for option, count in self._counts():
            is_count = count is None or (isinstance(count, Integral) and count >= 1)
            _check(is_count, option, f"{count!r} is not an integer of at least 1")
        _check(ahead in (None, 0, 1), "--async", f"{ahead!r} is not 0 or 1")

    def _counts(self) -> tuple[tuple[str, int | None], ...]:
        return ("--replicas", self.replicas), ("--concurrency", self.concurrency)

    @property
    def has_resources(self) -> bool:
        """Whether the step is to run on other resources."""
        return (self.replicas, self.concurrency, self.steps_ahead) != (None, None, None)

    def options(self) -> list[str]:
        """Return the changes as options of the command."""
        pairs: list[tuple[str, str]] = []
        for name, factor in self.scale.items():
            pairs.append(("--scale", f"{name}={factor:.6g}"))
        for name in self.balance:
            pairs.append(("--balance", _listed(name)))
        if self.no_tail is not None:
            pairs.append(("--no-tail", f"{self.no_tail:.6g}"))
        for name, value in self.tools.items():
            text = value if isinstance(value, str) else f"{value:.6g}s"
            pairs.append(("--tools", f"{name}={text}"))
        for name in self.unblock:
            pairs.append(("--unblock", _listed(name)))
        for option, count in (*self._counts(), ("--async", self.steps_ahead)):
            if count is not None:
                pairs.append((option, str(count)))
        return [f"{option} {shlex.quote(value)}" for option, value in pairs]

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
        scaled = len(self.scale) > len(self.kernels)
        times = (scaled, self.kernels, self.balance, self.no_tail, self.tools, self.unblock)
        changed = (*times, self.steps_ahead)
        return [sentence for sentence, change in zip(_ASSUMED, changed, strict=True) if change]


def _check(holds: bool, option: str, problem: str) -> None:
    if not holds:
        raise ConfigError(option, problem)


def _check_numbers(option: str, values: Any, example: str) -> None:
    is_mapping = isinstance(values, Mapping)
    _check(is_mapping, option, f"{values!r} is no mapping; give {{'name': {example}}}")
    for name, value in values.items():
        factor = factor_of(value) if option == "--tools" else None
        number: float | str = value if factor is None else factor
        is_finite = isinstance(number, Real) and 0 <= number < math.inf
        problem = f"{name}={value!r} is not a finite number of at least 0, such as {example}"
        _check(is_finite, option, problem)


def factor_of(value: object) -> float | None:
    """Return the factor that a text such as ``0.5x`` gives; ``None`` for anything else."""
    match = re.fullmatch(r"(\d+(\.\d*)?|\.\d+)x", value) if isinstance(value, str) else None
    return float(match[1]) if match else None


def _listed(name: str) -> str:
    r"""Return a name as an item of an option's list, in which a comma of a name is ``\,``."""
    return name.replace(",", "\\,")


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
