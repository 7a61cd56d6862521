"""A reward that takes a moment. verl calls it in its reward-loop workers."""

from __future__ import annotations

import time
from typing import Any
from zlib import crc32


def compute_score(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> float:
    """Return a number between 0 and 1 that depends on the response alone."""
    time.sleep(0.1)
    return crc32(solution_str.encode()) % 100 / 100
