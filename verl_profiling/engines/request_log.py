"""Facts of inference requests: noted while a capture is open, free of charge while none is.

The policy version is one of them. An engine may get new weights while it is captured, so a server
that knows its version says so when it changes; else the version is the one that the loop reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

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
        self._server_knows = False
        self._versions: list[int] = []

    @property
    def policy_versions(self) -> list[int]:
        """Versions of the weights since :meth:`begin`, in order; empty where nobody knows them."""
        return list(self._versions)

    def set_policy_version(self, version: int) -> None:
        """Note that the engine has other weights from now on."""
        self._server_knows = True
        self._policy_version = version
        if self._versions and self._versions[-1] != version:
            self._versions.append(version)

    def begin(self, policy_version: int | None) -> None:
        """Begin to take note.

        Args:
            policy_version: The version that the loop reports; the server's own is believed first.
        """
        if not self._server_knows:
            self._policy_version = policy_version
        self._versions = [] if self._policy_version is None else [self._policy_version]
        if self._enable:
            self._noted = []

    def end(self) -> list[Request]:
        """Stop taking note; return the requests that ended since :meth:`begin`."""
        noted, self._noted = self._noted, None
        return noted or []

    def weight_updates(self, name: str, requests: Sequence[Request]) -> list[str]:
        """Return a note where the weights changed since :meth:`begin`.

        Args:
            name: The replica's name.
            requests: What :meth:`end` returned.
        """
        if len(self._versions) < 2:
            return []
        begun = Counter(request.policy_version for request in requests)
        parts = ", then ".join(f"{version} ({begun[version]} requests)" for version in self._versions)
        return [f"{name}: the capture spans a weight update: policy version {parts}"]

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
