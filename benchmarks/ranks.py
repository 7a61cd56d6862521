"""The ranks of a loop on this machine."""

from __future__ import annotations

import os
import socket


def environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment of each rank of a loop on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    where["WORLD_SIZE"] = str(ranks)
    return [{**os.environ, **where, "RANK": str(rank)} for rank in range(ranks)]
