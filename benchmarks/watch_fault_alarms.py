"""What the watch says in a process while a loop runs in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Alarms", "alarms"]


class Alarms(logging.Handler):
    """Notes what the watch says that it noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note what is said."""
        if record.msg == "watch: %s":
            self.texts.append(record.getMessage())


@contextmanager
def alarms() -> Iterator[Alarms]:
    """Note what the watch says meanwhile."""
    handler, logger = Alarms(), logging.getLogger("verl_profiling.controller.anomalies")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
