"""The adapter of transformers models, which compute in this process and are recorded there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from verl_profiling.engines.adapter import EngineAdapter
from verl_profiling.engines.request_log import OpenRequest, RequestLog
from verl_profiling.identity import WorkerIdentity


class TransformersAdapter(EngineAdapter):
    """Logs the requests of a model, which computes in this process; the session records it."""

    name = "transformers"

    @classmethod
    def computes_here(cls, engine: Any) -> bool:
        return True

    @classmethod
    def watch(cls, engine: Any, log: RequestLog, identity: WorkerIdentity) -> None:
        watch_transformers(engine, log)


def watch_transformers(model: Any, log: RequestLog) -> None:
    """Log all sequences of a batch as requests when ``generate`` of ``transformers`` returns."""

    def logged(generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids: Any = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        prompts = kwargs.get("inputs_embeds") if ids is None else ids
        if prompts is None:  # e.g. a speech model, whose input is audio
            with log.busy or nullcontext():
                return generate(*args, **kwargs)
        with log.open() as record:
            try:
                output = generate(*args, **kwargs)
            except BaseException:
                for row in prompts:
                    record.close(len(row), 0, failed=True)
                raise
            close_all(record, prompts, output, ids is None, kwargs)
        return output

    def close_all(
        record: OpenRequest, prompts: Any, output: Any, are_embeddings: bool, kwargs: dict[str, Any]
    ) -> None:
        """Close the record of a batch once for each sequence."""
        sequences = getattr(output, "sequences", output)
        if not log.recording:  # lengths would cost a wait for the device
            for _ in sequences:
                record.close(0, 0)
            return
        config = kwargs.get("generation_config") or model.generation_config
        ends = _token_ids(kwargs.get("eos_token_id", config.eos_token_id))
        padding = [*_token_ids(kwargs.get("pad_token_id", config.pad_token_id)), *ends, None][0]
        mask = kwargs.get("attention_mask")
        for row, sequence in enumerate(sequences):
            of = row * len(prompts) // len(sequences)  # the sequences of a prompt follow each other
            prompt = prompts.shape[1] if mask is None else int(mask[of].sum())
            response = sequence if are_embeddings else sequence[prompts.shape[1] :]
            if log.hashes_prompts and not are_embeddings:
                kept = prompts[of] if mask is None else prompts[of][mask[of].bool()]
                record.prompt_ids = kept.tolist()
            record.close(prompt, _length(response, padding, ends))

    log.watch_calls(model, logged)


def _token_ids(given: Any) -> list[int]:
    """Return the token ids of a number, a list or a tensor; empty for ``None``."""
    given = given.tolist() if hasattr(given, "tolist") else given
    return [] if given is None else list(given) if isinstance(given, Iterable) else [given]


def _length(response: Any, padding: int | None, ends: Sequence[int]) -> int:
    """Return the number of tokens without the padding at the end,
    but with the token that ended the text.
    """
    if padding is None:
        return len(response)
    kept = (response != padding).nonzero()
    return min((int(kept[-1]) + 1 if len(kept) else 0) + (padding in ends), len(response))
