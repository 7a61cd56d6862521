"""Engines that compute in this process: transformers, and vLLM without processes of its own.

The profilers are process-wide, so the session of the process records such an engine like any
other worker, and a trainer that shares the process joins the capture instead of fighting it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply, cannot_be_had
from verl_profiling.capture.session import process_session
from verl_profiling.engines.adapter import role_of_capture
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["SessionRecorder", "watch_transformers"]


class SessionRecorder:
    """Passes a replica's captures to the session of this process.

    Args:
        config: All settings.
        identity: The replica.
        requests: The log of its requests.
        elsewhere: Name of the engine, if it computes in other processes, of which nothing is recorded.
    """

    def __init__(
        self, config: ProfilingConfig, identity: WorkerIdentity, requests: RequestLog, elsewhere: str = ""
    ) -> None:
        self._config = config
        self._elsewhere = elsewhere
        self._identity = identity
        self._requests = requests
        self._open = ""
        process_session().register(config, identity)

    async def start(self, request: CaptureRequest) -> StartReply:
        """Start a capture, or join the one of this process."""
        session, who = process_session(), self._identity
        if request.stage is not None and not self._open and session.recording:
            reason = f"another role of this process records by stage: mark this with stage({request.stage!r})"
            return StartReply(who, "skipped", reason=reason)
        if self._elsewhere:
            try:
                role_of_capture(self._config, who.role, request, self._elsewhere)
            except ConfigError as error:
                return StartReply(who, "refused", reason=cannot_be_had(request, error))
        reply = session.start(request, who)
        if reply.status in ("recording", "joined") and self._open != request.capture_id:
            self._open = request.capture_id
            self._requests.begin(request.policy_version)
            session.complete_result(self._with_requests)
        return reply

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture; never raises for one that is not open."""
        reply = process_session().stop(capture_id)
        if finish_s:  # on a thread, so that the event loop is not blocked
            return await asyncio.to_thread(process_session().stop, capture_id, finish_s)
        if reply.result.status == "skipped" and reply.result.identity.name != self._identity.name:
            result = msgspec.structs.replace(reply.result, identity=self._identity)
            return msgspec.structs.replace(reply, result=result)
        return reply

    def _with_requests(self, result: CaptureResult) -> CaptureResult:
        self._open = ""
        return self._requests.end_in_result(self._identity.name, result)


def watch_transformers(model: Any, log: RequestLog) -> None:
    """Log every sequence of a ``generate`` call; transformers returns the whole batch at the end."""

    def logged(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        record = log.open()
        prompts: Any = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        try:
            output = generate(*args, **kwargs)
        except BaseException:
            for row in prompts:
                record.close(len(row), 0, failed=True)
            raise
        mask = kwargs.get("attention_mask")
        padding = model.generation_config.pad_token_id
        for row, sequence in enumerate(getattr(output, "sequences", output)):
            prompt = prompts.shape[1] if mask is None else int(mask[row % len(mask)].sum())
            record.close(prompt, _length(sequence[prompts.shape[1] :], padding))
        return output

    log.watch_calls(model, logged)


def _length(response: Any, padding: int | None) -> int:
    """Return the number of tokens before the padding at the end."""
    if padding is None:
        return int(response.shape[0])
    kept = (response != padding).nonzero()
    return int(kept[-1]) + 1 if len(kept) else 0
