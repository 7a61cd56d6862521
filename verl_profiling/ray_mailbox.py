"""An actor of Ray in which captures are asked for, where the job and who asks share no folder.

It holds the messages of :mod:`verl_profiling.demand` as bytes, so that both sides may have other versions of
the package. Whoever may connect to the cluster may ask; nothing in a message is a path or a program.
"""

from __future__ import annotations

import asyncio
import re

from verl_profiling.demand import (
    MOST_ANSWERS,
    MOST_PENDING,
    Demand,
    decode_message,
)
from verl_profiling.errors import TraceFormatError

__all__ = ["NAMESPACE", "Mailbox", "Taken"]

NAMESPACE = "verl-profiling"
"""The namespace of all mailboxes."""
_MOST_NEWS = 64
_REQUEST_ID = re.compile(r"[0-9a-f]{12}")

Taken = tuple[list[bytes], list[str], list[str]]
"""Requests, the ids of those to be cancelled, and sentences on what was none."""


class Mailbox:
    """What the actor is. It is made by the job's loop and dies with the job."""

    def __init__(self) -> None:
        self._state = b""
        self._asked: dict[str, bytes] = {}
        self._answers: dict[str, bytes] = {}
        self._new: Taken = ([], [], [])
        self._came, self._begun = asyncio.Event(), asyncio.Event()

    async def take(self) -> Taken:
        """Wait until something has come, and return it: the loop has one such call under way."""
        await self._came.wait()
        self._came.clear()
        taken, self._new = self._new, ([], [], [])
        return taken

    async def beat(self, state: bytes) -> None:
        """Keep the loop's sign of life."""
        self._state = state
        self._begun.set()

    async def give(self, request: str, answer: bytes) -> None:
        """Keep the loop's answer to a request."""
        self._asked.pop(request, None)
        self._answers[request] = answer
        if len(self._answers) > MOST_ANSWERS:
            del self._answers[next(iter(self._answers))]

    async def state(self) -> bytes:
        """Return the sign of life; the first one is waited for."""
        await self._begun.wait()
        return self._state

    async def ask(self, data: bytes) -> str:
        """Leave a request; return why it is not taken, or nothing."""
        demands, _, rejected = self._new
        try:
            request = decode_message(data, Demand, "the request").id
        except TraceFormatError as error:
            if len(rejected) < _MOST_NEWS:
                rejected.append(str(error))
                self._came.set()
            return str(error)
        if len(self._asked) >= MOST_PENDING:
            return f"{MOST_PENDING} requests are waiting already; cancel one"
        if request in self._asked or request in self._answers:
            return "another request has the same id"
        self._asked[request] = data
        demands.append(data)
        self._came.set()
        return ""

    async def cancel(self, request: str) -> None:
        """Leave word that a request is to be forgotten."""
        _, cancelled, _ = self._new
        if isinstance(request, str) and _REQUEST_ID.fullmatch(request) and len(cancelled) < _MOST_NEWS:
            cancelled.append(request)
            self._came.set()

    async def answer(self, request: str) -> bytes | None:
        """Return what was answered to a request."""
        return self._answers.get(request)

    async def answers(self) -> list[bytes]:
        """Return all answers that are kept."""
        return list(self._answers.values())

    async def waiting(self) -> list[bytes]:
        """Return the requests that are not answered yet."""
        return list(self._asked.values())
