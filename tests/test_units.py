"""Times and sizes are written in the unit that fits, wherever a person reads them."""

from __future__ import annotations

import pytest

from verl_profiling.units import byte_size, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (74520067.4, "74,520,067 s"),
        (9.996, "10.0 s"),
        (0.99951, "1.00 s"),
        (0.9994, "999 ms"),
        (0.00014, "140 us"),
        (3.2e-7, "320 ns"),
        (3e-12, "0.003 ns"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_a_time_has_three_digits_and_the_unit_that_fits(seconds: float, text: str) -> None:
    """Rounding is done before the unit is chosen, so there are no 1000 ms; a change has a sign."""
    assert duration(seconds) == text
    assert duration(seconds, signed=True) == ("+" * (seconds > 0) + text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (999_600, "1 MB"),
        (1_500_000_000, "1.5 GB"),
        (12_345 * 10**12, "12,345 TB"),
    ],
)
def test_a_size_has_three_digits_and_the_unit_that_fits(size: int, text: str) -> None:
    assert byte_size(size) == text
