"""The tested versions of verl."""

from __future__ import annotations

TESTED = ("0.9.0", "0.9.1")
"""Versions of verl that the tests run with; end-to-end runs use only the newest of them."""


def untested() -> str | None:
    """Return a warning if the installed version of verl is untested, else ``None``."""
    from verl import __version__ as version

    if version in TESTED:
        return None
    return f"verl {version} was not tested with this package, {' and '.join(TESTED)} were"
