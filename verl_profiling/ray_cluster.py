"""Whether this process is part of a Ray cluster, and connects a command to one."""

from __future__ import annotations

import socket
import sys
from typing import Any

from verl_profiling.errors import ToolUnavailableError

__all__ = ["check_in_cluster", "connected", "in_cluster"]

_KNOCK_S = 3.0


def in_cluster() -> bool:
    """Return whether this process is part of a Ray cluster; Ray is not imported for that."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def check_in_cluster() -> None:
    """Check that an actor may be called: without a cluster, Ray would start another one for the call.

    Raises:
        RuntimeError: This process has left its cluster.
    """
    if not in_cluster():
        raise RuntimeError("this process has left its Ray cluster")


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
