"""Logs the requests of vLLM's ``AsyncLLM`` and ``LLM``."""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Any

from verl_profiling import clock
from verl_profiling.engines.request_log import OpenRequest, RequestLog

_REFUSED = "RetryableRequestError"  # raised by a paused engine, from vLLM 0.33 on


def watch_vllm(engine: Any, log: RequestLog) -> None:
    """Log every request of an ``LLM`` or an ``AsyncLLM`` with a wrapper around ``generate``.

    Each output of vLLM has the id, lengths and cached tokens of its request. Without
    ``disable_log_stats``, it also has ``RequestStateStats``: times on the monotonic clock of the
    engine core's process, and from 0.30 on the number of preemptions. A request with several
    samples has none of these times, and no count of cached tokens: vLLM reports them for one
    sample.
    """
    shares_clock = _shares_clock(engine)
    if log.busy is not None:
        log.busy.sums.tokens.append(partial(_tokens_of_open_requests, weakref.ref(engine)))

    def logged_batch(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if log.running:  # logged already: chat() of an older vLLM calls generate()
            return generate(*args, **kwargs)
        with log.open() as batch:
            outputs = generate(*args, **kwargs)
            for output in outputs:
                batch.id = output.request_id
                _tell(batch, output if len(output.outputs) == 1 else None, shares_clock=True)
                batch.prompt_ids = output.prompt_token_ids or ()
                for sample in output.outputs:
                    batch.close(
                        _prompt_tokens(output), len(sample.token_ids), failed=_is_aborted(sample)
                    )
        return outputs

    if hasattr(engine, "llm_engine"):
        for method in ("generate", "chat"):
            if hasattr(engine, method):
                log.watch_calls(engine, logged_batch, method)
    else:
        log.watch_streams(engine, "generate", partial(_noting, log, shares_clock))


def _tokens_of_open_requests(held: Callable[[], Any]) -> int:
    """Return the number of tokens of the engine's open requests; 0 for engines of vLLM's V0."""
    engine = held()
    processor = getattr(getattr(engine, "llm_engine", engine), "output_processor", None)
    states = [*getattr(processor, "request_states", {}).values()]
    return sum(
        len(getattr(getattr(state, "detokenizer", None), "token_ids", ())) for state in states
    )


async def _noting(
    log: RequestLog,
    shares_clock: bool,
    stream: AsyncGenerator[Any, None],
    prompt: Any = None,
    sampling_params: Any = None,
    request_id: str = "",
    *_: Any,
    **__: Any,
) -> AsyncGenerator[Any, None]:
    """Log a request that begins now; yield its outputs."""
    samples = _Samples(sampling_params)
    last: Any = None
    with log.open(id=request_id) as record:
        try:
            async for output in stream:
                if last is None and not output.finished:
                    record.first_token()
                if samples.come_in_parts:
                    samples.add(output.outputs)
                last = output
                yield output
        except Exception as error:
            if last is None and type(error).__name__ == _REFUSED:
                record.refused()
            raise
        finally:
            if last is not None and not samples.lengths:  # the last output of one sample has all
                samples.add(last.outputs)
            _tell(record, last if samples.has_times else None, shares_clock)
            samples.close(record, last)
            # An abandoned request is aborted at once, as without this wrapper.
            await stream.aclose()


class _Samples:
    """The samples of a request: lengths by index, and the aborted samples.

    Attributes:
        come_in_parts: Whether all outputs are needed for the lengths, and not only the last one.
    """

    def __init__(self, parameters: Any) -> None:
        self._in_deltas = getattr(getattr(parameters, "output_kind", None), "name", "") == "DELTA"
        self._number = getattr(parameters, "n", None) or 1
        self._aborted: set[int] = set()
        self.come_in_parts = self._in_deltas or self._number > 1
        self.lengths: dict[int, int] = {}

    @property
    def has_times(self) -> bool:
        """Whether vLLM reports the times of the request."""
        return self._number == 1 and any(self.lengths.values())

    def add(self, samples: Iterable[Any]) -> None:
        """Add the samples of an output."""
        for sample in samples:
            earlier = self.lengths.get(sample.index, 0) if self._in_deltas else 0
            self.lengths[sample.index] = earlier + len(sample.token_ids)
            if _is_aborted(sample):
                self._aborted.add(sample.index)

    def close(self, record: OpenRequest, last: Any) -> None:
        """Close the record once for each sample, also for samples without an output yet."""
        is_cut = last is None or not last.finished
        record.prompt_ids = getattr(last, "prompt_token_ids", None) or ()
        for index in range(max(self._number, len(self.lengths))):
            failed = is_cut or index in self._aborted
            record.close(_prompt_tokens(last), self.lengths.get(index, 0), failed=failed)


def _is_aborted(sample: Any) -> bool:
    return getattr(sample, "finish_reason", None) == "abort"


def _tell(record: OpenRequest, output: Any, shares_clock: bool) -> None:
    """Copy vLLM's data on a request into the record of the request;
    a request without output has none.
    """
    record.arrival_ns = record.scheduled_ns = record.first_token_ns = record.last_token_ns = 0
    record.cached_tokens = getattr(output, "num_cached_tokens", None)
    statistics = getattr(output, "metrics", None)
    record.preemptions = getattr(statistics, "num_preemptions", None)
    if statistics is None or not shares_clock:
        return
    ahead_ns = clock.now_ns() - time.monotonic_ns()

    def unix_ns(name: str) -> int:
        monotonic_s = getattr(statistics, name, 0.0)
        return ahead_ns + round(monotonic_s * 1e9) if monotonic_s else 0

    record.arrival_ns = unix_ns("queued_ts")
    record.scheduled_ns = unix_ns("scheduled_ts")
    record.first_token_ns = unix_ns("first_token_ts")
    record.last_token_ns = unix_ns("last_token_ts")


def _shares_clock(engine: Any) -> bool:
    """Return whether all engine cores run on this host, and so share one monotonic clock."""
    parallel = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
    here = getattr(parallel, "data_parallel_size_local", 1)
    return (
        getattr(parallel, "local_engines_only", False)
        or getattr(parallel, "data_parallel_size", 1) <= here
    )


def _prompt_tokens(output: Any) -> int:
    return 0 if output is None else len(output.prompt_token_ids or ())
