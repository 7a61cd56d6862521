"""Facts of inference requests: noted while a capture is open, free of charge while none is."""

from __future__ import annotations

from verl_profiling import clock
from verl_profiling.manifest import Request

__all__ = ["OpenRequest", "RequestLog"]


class RequestLog:
    """The requests of one replica.

    An adapter asks :meth:`open` when a request begins: ``None`` means that nobody wants to
    know, and that the request should be passed on untouched.

    Args:
        replica: Index of the replica.
        enable: ``rollout.requests``.
    """

    def __init__(self, replica: int, enable: bool) -> None:
        self._replica = replica
        self._enable = enable
        self._noted: list[Request] | None = None
        self._policy_version: int | None = None

    def begin(self, policy_version: int | None) -> None:
        """Begin to take note."""
        self._policy_version = policy_version
        if self._enable:
            self._noted = []

    def end(self) -> list[Request]:
        """Stop taking note; return the requests that ended since :meth:`begin`."""
        noted, self._noted = self._noted, None
        return noted or []

    def open(self) -> OpenRequest | None:
        """Return a record of a request that begins now, or ``None`` while nothing takes note."""
        noted = self._noted
        return None if noted is None else OpenRequest(noted, self._replica, self._policy_version)


class OpenRequest:
    """A request that has begun and not ended."""

    __slots__ = ("_begin_ns", "_first_token_ns", "_noted", "_policy_version", "_replica")

    def __init__(self, noted: list[Request], replica: int, policy_version: int | None) -> None:
        self._noted = noted
        self._replica = replica
        self._policy_version = policy_version
        self._begin_ns = clock.now_ns()
        self._first_token_ns = 0

    def first_token(self) -> None:
        """Note that the first output arrived; later calls change nothing."""
        if not self._first_token_ns:
            self._first_token_ns = clock.now_ns()

    def close(self, prompt_tokens: int, response_tokens: int, *, failed: bool = False) -> None:
        """Note that the request ended. A batch closes one record once for each of its requests."""
        self._noted.append(
            Request(
                replica=self._replica,
                begin_ns=self._begin_ns,
                first_token_ns=self._first_token_ns,
                end_ns=clock.now_ns(),
                prompt_tokens=prompt_tokens,
                response_tokens=response_tokens,
                policy_version=self._policy_version,
                failed=failed,
            )
        )
