"""Engines that compute in this process: transformers, and vLLM without processes of its own.

The profilers are process-wide, so the session of the process records such an engine like any
other worker, and a trainer that shares the process joins the capture instead of fighting it.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from verl_profiling.config import ProfilingConfig
from verl_profiling.engines.recorder import Recorder
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.messages import CaptureRequest, StartReply, StopReply
from verl_profiling.session import process_session

__all__ = ["SessionRecorder", "watch_transformers"]


class SessionRecorder(Recorder):
    """Hands a replica's captures to the session of this process.

    Args:
        config: All settings.
        identity: The replica.
        requests: Takes note of requests.

    Raises:
        ConfigError: A window in engine iterations is asked for, which nothing counts here.
    """

    def __init__(self, config: ProfilingConfig, identity: WorkerIdentity, requests: RequestLog) -> None:
        for name in ("start", "count"):
            if getattr(config.rollout, name):
                raise ConfigError(
                    f"rollout.{name}",
                    f"{identity} computes in this process, where no engine counts iterations; leave it out",
                )
        self._identity = identity
        self._requests = requests
        self._open_id: str | None = None
        process_session().register(config, identity)

    async def start(self, request: CaptureRequest) -> StartReply:
        reply = process_session().start(request, self._identity)
        if reply.status in ("recording", "joined") and self._open_id != request.capture_id:
            self._open_id = request.capture_id
            self._requests.begin(request.policy_version)
        return reply

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        reply = process_session().stop(capture_id, finish_s)
        if self._open_id is None or capture_id not in (None, self._open_id):
            return reply
        self._open_id = None
        return msgspec.structs.replace(
            reply, result=msgspec.structs.replace(reply.result, requests=self._requests.end())
        )


def watch_transformers(model: Any, log: RequestLog) -> None:
    """Note every sequence of a ``generate`` call; transformers hands over a whole batch at its end."""
    generate = model.generate

    @functools.wraps(generate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        record = log.open()
        output = generate(*args, **kwargs)
        if record is not None:
            prompts: Any = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
            sequences = getattr(output, "sequences", output)
            padding = model.generation_config.pad_token_id
            responses = sequences[:, prompts.shape[1] :]
            mask = kwargs.get("attention_mask")
            for row in range(len(sequences)):
                prompt = prompts.shape[1] if mask is None else int(mask[row % len(mask)].sum())
                record.close(prompt, _length(responses[row], padding))
        return output

    model.generate = watched


def _length(response: Any, padding: int | None) -> int:
    """Return the number of tokens before the padding at the end."""
    if padding is None:
        return int(response.shape[0])
    kept = (response != padding).nonzero()
    return int(kept[-1]) + 1 if len(kept) else 0
