"""Records the buckets in which verl sends weights to a rollout engine of the same node.

A bucket lasts from its sending until the engine has loaded it, and answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import wrapt

from verl_profiling import clock
from verl_profiling.capture.session import process_session
from verl_profiling.capture.stage_spans import SpanLog
from verl_profiling.integrations.hooks import wrap
from verl_profiling.manifest import BUCKET


def hook_vllm_buckets(module: Any) -> None:
    """Record the buckets of ``BucketedWeightSender``."""
    wrap(module.BucketedWeightSender, "_init_socket", _connected)


def hook_sglang_buckets(module: Any) -> None:
    """Record the buckets of ``ServerAdapter.update_weights``."""
    wrap(module, "get_named_tensor_buckets", _buckets)


def _connected(init: Callable[..., Any], self: Any) -> None:
    init(self)
    log = process_session().log
    if log is not None:
        self.socket = _BucketSocket(self.socket, log)


class _BucketSocket(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A socket whose messages are buckets, each of which the engine acknowledges."""

    def __init__(self, socket: Any, log: SpanLog) -> None:
        super().__init__(socket)
        self._self_log = log
        self._self_bytes = self._self_begin_ns = 0

    def send_pyobj(self, message: Any, *args: Any, **kwargs: Any) -> Any:
        """Send a message, and note the begin and the size of a bucket."""
        if isinstance(message, dict) and "bucket_meta" in message:
            tensors = message["bucket_meta"].values()
            self._self_bytes = sum(
                tensor["shape"].numel() * tensor["dtype"].itemsize for tensor in tensors
            )
            self._self_begin_ns = clock.now_ns()
        return self.__wrapped__.send_pyobj(message, *args, **kwargs)

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        """Receive an answer, which ends the bucket."""
        answer = self.__wrapped__.recv(*args, **kwargs)
        if self._self_bytes:
            self._self_log.ended(BUCKET, self._self_begin_ns, clock.now_ns(), self._self_bytes)
            self._self_bytes = 0
        return answer


def _buckets(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    buckets, log = make(*args, **kwargs), process_session().log
    return buckets if log is None else _recorded(buckets, log)


async def _recorded(buckets: AsyncIterator[Any], log: SpanLog) -> AsyncIterator[Any]:
    """Yield the buckets; the caller sends one before it takes the next."""
    async for bucket in buckets:
        begin_ns = clock.now_ns()
        yield bucket
        size = sum(tensor.nbytes for _, tensor in bucket)
        log.ended(BUCKET, begin_ns, clock.now_ns(), size)
