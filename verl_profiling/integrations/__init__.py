"""Integrations with training frameworks; each is loaded only where its framework runs."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_BROKEN = (
    "verl_profiling cannot be imported whole, so this run is not profiled, or not all of it "
    "(%s: %s); verl runs on. Install what 'pip check' names, or verl_profiling again"
)
_warned: set[str] = set()


def warn_of_broken_package(error: Exception) -> None:
    """Log once in this process why this package cannot profile, and the remedy.

    verl itself logs a plugin that cannot be imported at level DEBUG, which nobody reads.
    """
    text = str(error)
    if text not in _warned:
        _warned.add(text)
        logger.warning(_BROKEN, type(error).__name__, text)
