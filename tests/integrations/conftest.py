"""What tests of integrations put back for all tests after them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_log_lines() -> Iterator[None]:
    """A profiled run of verl prints this package's lines from ``INFO`` up;
    other tests count on less.
    """
    package = logging.getLogger("verl_profiling")
    level, handlers = package.level, [*package.handlers]
    yield
    package.setLevel(level)
    package.handlers[:] = handlers
