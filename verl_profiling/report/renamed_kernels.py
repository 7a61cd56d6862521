"""Joins kernels whose names differ between two versions, by the operator that launched them.

Another version of a library has another name for a kernel. As one kernel gone and one new, their
times would not be compared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from verl_profiling.steps.step import Source
from verl_profiling.steps.trace import Trace

# Kineto's number of the innermost operator, which its kernels have as well
_EXTERNAL = re.compile(rb'"External id"\s*:\s*"?(\d+)')
_OPERATOR = "cpu_op"


def renamed_kernels(
    gone: set[str], new: set[str], before: Sequence[Source], after: Sequence[Source]
) -> dict[str, str]:
    """Return a common name for kernels of one side, where one operator launched kernels of such
    names on both sides.

    Args:
        gone: Names of kernels that only A has.
        new: Names of kernels that only B has.
        before: The traces of A.
        after: The traces of B.
    """
    if not (gone and new):
        return {}
    operators, others = _operators(before, gone), _operators(after, new)
    joint = set(operators.values()) & set(others.values())
    both = (operators | others).items()
    return {name: f"kernels of {operator}" for name, operator in both if operator in joint}


def _operators(sources: Sequence[Source], names: set[str]) -> dict[str, str]:
    """Return the operator that launched each of these kernels last, as far as traces say."""
    found = {}
    for source in sources:
        operators: dict[bytes, str] = {}
        launched: dict[str, bytes] = {}
        for event in chain.from_iterable(Trace(source.file).chunks()):
            number = _EXTERNAL.search(event.args)
            if number and event.cat == _OPERATOR:
                operators[number[1]] = event.name
            elif number and event.name in names:
                launched[event.name] = number[1]
        for name, of_operator in launched.items():
            if of_operator in operators:
                found[name] = operators[of_operator]
    return found
