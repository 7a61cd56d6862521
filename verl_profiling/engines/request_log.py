"""A log of inference requests, kept while a capture is open. Otherwise it costs next to nothing.

Each request has a policy version. An engine may get new weights while it is captured, so a server
that knows its version reports every change; otherwise the version is the one that the loop reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from verl_profiling import clock
from verl_profiling.manifest import Request

__all__ = ["OpenRequest", "RequestLog"]


class RequestLog:
    """The requests of one replica: when each began, got its first token and ended, and its lengths.

    A server with an engine of its own makes one, passes it to
    :meth:`RolloutCaptureMixin.init_capture() <verl_profiling.workers.RolloutCaptureMixin.init_capture>`
    and opens a record for each request::

        with self.requests.open(prompt_tokens=len(prompt)) as request:
            for token in self.model.generate(prompt):
                request.first_token()
                request.response_tokens += 1

    Tasks and threads may use it at the same time. Until a capture is open nothing is kept, and a
    record reads no clock.
    """

    def __init__(self) -> None:
        self._replica = 0
        self._enable = False
        self._noted: list[Request] | None = None
        self._policy_version: int | None = None
        self._server_knows = False
        self._versions: list[int] = []

    def serve(self, replica: int, enable: bool) -> None:
        """Set whose requests these are.

        Args:
            replica: Index of the replica.
            enable: ``rollout.requests``.
        """
        self._replica = replica
        self._enable = enable

    @property
    def noting(self) -> bool:
        """Whether a request that begins now would be logged; if not, an adapter does not wrap it."""
        return self._noted is not None

    @property
    def policy_versions(self) -> list[int]:
        """Versions of the weights since :meth:`begin`, in order; empty if unknown."""
        return list(self._versions)

    def set_policy_version(self, version: int) -> None:
        """Record that the engine has new weights from now on."""
        self._server_knows = True
        self._policy_version = version
        if self._versions and self._versions[-1] != version:
            self._versions.append(version)

    def begin(self, policy_version: int | None) -> None:
        """Start logging.

        Args:
            policy_version: The version that the loop reports; the server's own takes precedence.
        """
        if not self._server_knows:
            self._policy_version = policy_version
        self._versions = [] if self._policy_version is None else [self._policy_version]
        if self._enable:
            self._noted = []

    def end(self) -> list[Request]:
        """Stop logging; return the requests that ended since :meth:`begin`."""
        noted, self._noted = self._noted, None
        return noted or []

    def weight_updates(self, name: str, requests: Sequence[Request]) -> list[str]:
        """Return a note if the weights changed since :meth:`begin`.

        Args:
            name: The replica's name.
            requests: What :meth:`end` returned.
        """
        if len(self._versions) < 2:
            return []
        begun = Counter(request.policy_version for request in requests)
        parts = ", then ".join(f"{version} ({begun[version]} requests)" for version in self._versions)
        return [f"{name}: the capture spans a weight update: policy version {parts}"]

    def open(self, prompt_tokens: int = 0) -> OpenRequest:
        """Return a record of a request that begins now, to be used in a ``with`` block.

        Args:
            prompt_tokens: Length of the prompt, if it is known already.
        """
        return OpenRequest(self._noted, self._replica, self._policy_version, prompt_tokens)


class OpenRequest:
    """A request that has begun and not ended; the end of its ``with`` block ends it.

    If an exception leaves the block, cancellation included, the request has failed.

    Attributes:
        prompt_tokens: Length of the prompt.
        response_tokens: Length of the response so far.
    """

    __slots__ = (
        "_begin_ns",
        "_closed",
        "_first_token_ns",
        "_noted",
        "_policy_version",
        "_replica",
        "prompt_tokens",
        "response_tokens",
    )

    def __init__(
        self, noted: list[Request] | None, replica: int, policy_version: int | None, prompt_tokens: int
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.response_tokens = 0
        self._noted = noted
        self._replica = replica
        self._policy_version = policy_version
        self._begin_ns = 0 if noted is None else clock.now_ns()
        self._first_token_ns = 0
        self._closed = False

    def __enter__(self) -> OpenRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._closed:
            self.close(self.prompt_tokens, self.response_tokens, failed=kind is not None)

    def first_token(self) -> None:
        """Record that the first output arrived; later calls change nothing."""
        if not self._first_token_ns and self._noted is not None:
            self._first_token_ns = clock.now_ns()

    def close(self, prompt_tokens: int, response_tokens: int, *, failed: bool = False) -> None:
        """Record that the request ended; for an engine that returns a batch, once per request of it.

        Args:
            prompt_tokens: Length of the prompt.
            response_tokens: Length of the response.
            failed: It raised, or was cancelled.
        """
        self._closed = True
        if self._noted is None:
            return
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
