"""Connects a command to a Ray cluster."""

from __future__ import annotations

import socket
from typing import Any

from verl_profiling.errors import ToolUnavailableError

__all__ = ["connected"]

_KNOCK_S = 3.0


def connected(command: str, address: str, purpose: str) -> Any:
    """Return the module ``ray``, connected to a cluster, unless this process is in one already.

    Args:
        command: Which command it is for, for the errors.
        address: Address of the cluster; ``auto`` for the one that this host is part of.
        purpose: What cannot be had without.

    Raises:
        ToolUnavailableError: There is no Ray, or no cluster.
    """
    try:
        import ray
    except ImportError:
        raise ToolUnavailableError(f"{command}: {purpose} through Ray: pip install ray") from None
    if not ray.is_initialized():
        try:
            _knock(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except Exception as error:  # no cluster, or another version of it
            raise ToolUnavailableError(
                f"{command}: no Ray cluster at {address} ({error}); run this on a node of the cluster that "
                "trains, or name its HOST:PORT; one that wants a token needs RAY_AUTH_MODE=token"
            ) from error
    return ray


def _knock(address: str) -> None:
    """Raise ``OSError`` if nobody listens at an address; Ray takes half a minute to say so."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), _KNOCK_S).close()
