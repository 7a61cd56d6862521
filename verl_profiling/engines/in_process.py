"""Engines that compute in this process: transformers, and vLLM without processes of its own.

The profilers are process-wide, so the session of the process records such an engine like any
other worker, and a trainer that shares the process joins the capture instead of fighting it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from contextlib import nullcontext
from typing import Any

import msgspec

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply, cannot_be_had
from verl_profiling.capture.result_file import NOT_STOPPED
from verl_profiling.capture.session import process_session
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["SessionRecorder", "watch_transformers"]

logger = logging.getLogger(__name__)


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
        self._capture_id = ""
        self._open = False
        process_session().register(config, identity)

    async def start(self, request: CaptureRequest) -> StartReply:
        """Start a capture, or join the one of this process."""
        session, who = process_session(), self._identity
        if request.stage is not None and not self._open and session.recording:
            reason = f"another role of this process records by stage: mark this with stage({request.stage!r})"
            return StartReply(who, "skipped", reason=reason)
        if why := self._refusal(request):
            return StartReply(who, "refused", reason=why)
        if self._open and self._capture_id != request.capture_id:
            left = (await self.stop(self._capture_id, 0.0)).result
            logger.warning("%s: step %d was never stopped", who, left.step)
            session.amend(
                self._capture_id,
                lambda one: msgspec.structs.replace(one, status="failed", reason=NOT_STOPPED),
            )
        reply = session.start(request, who)
        self._open = reply.status in ("recording", "joined")
        if self._open and self._capture_id != request.capture_id:
            self._capture_id = request.capture_id
            self._requests.begin(request.policy_version)
        return reply

    def _refusal(self, request: CaptureRequest) -> str:
        """Return why a capture cannot be had that is aimed at the processes of an engine."""
        if not self._elsewhere or request.aim is None:
            return ""
        try:
            role = self._config.for_role(self._identity.role, request.aim)
        except ConfigError as error:
            return cannot_be_had(request, error)
        if not (role.enable and any(tool.suffix for tool in role.tools)):
            return ""
        return cannot_be_had(request, f"{self._elsewhere} was started to be recorded without a trace")

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture; never raises for one that is not open."""
        reply = process_session().stop(capture_id)
        result = reply.result
        if result.status == "skipped" and result.identity.name != self._identity.name:
            result = msgspec.structs.replace(result, identity=self._identity)
        elif result.capture_id == self._capture_id and self._open:
            self._open = False
            entered = self._requests.end_in_result(self._identity.name)
            result = process_session().amend(result.capture_id, entered) or result
        if finish_s:  # on a thread, so that the event loop is not blocked
            asked = None if capture_id is None else result.capture_id
            return await asyncio.to_thread(process_session().stop, asked, finish_s)
        return msgspec.structs.replace(reply, result=result)


def watch_transformers(model: Any, log: RequestLog) -> None:
    """Log every sequence of a ``generate`` call; transformers returns the whole batch at the end."""
    generate = model.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with log.busy or nullcontext():
            return noted(*args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not log.noting:
            return generate(*args, **kwargs)
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

    model.generate = watched


def _length(response: Any, padding: int | None) -> int:
    """Return the number of tokens before the padding at the end."""
    if padding is None:
        return int(response.shape[0])
    kept = (response != padding).nonzero()
    return int(kept[-1]) + 1 if len(kept) else 0
