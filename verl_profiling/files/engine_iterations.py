"""Parses the names of engine iterations in traces.

An engine annotates each of its iterations, under a name with the numbers of requests and tokens. A
new engine needs a row in ``ITERATION_NAMES``, unless it uses the names of vLLM or SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

UNKNOWN_TOKENS = -1
"""Stands for the number of tokens of an iteration, if its name does not have the number."""


class Iteration(NamedTuple):
    """Numbers of tokens of one engine iteration; :data:`UNKNOWN_TOKENS` if not in its name.

    Attributes:
        prompt: Prompt tokens, which SGLang computes again after a retraction.
        new: New tokens, one for each generating request.
        again: Further tokens of generating requests: draft tokens, and tokens that are computed
            again after a preemption.
    """

    prompt: int
    new: int
    again: int = 0


class Attention(NamedTuple):
    """Work of the attention of one engine iteration; :data:`UNKNOWN_TOKENS` if not in its name.

    Attributes:
        pairs: Pairs of a scheduled token with itself or a token before it, in its sequence.
        cached: Sum of the lengths of all sequences, with their scheduled tokens.
    """

    pairs: int = UNKNOWN_TOKENS
    cached: int = UNKNOWN_TOKENS


# vLLM (its v1/worker/gpu_worker.py): tokens by context and generation, seen in 0.32. In 0.10.2 to
# 0.14 (PRs 22496, 31193) numbers of requests only; with detailed annotations (PR 37524) tokens,
# then sums of lengths.
_TOKENS = r"\((?:sq)?(\d{1,12})(?:[a-z_]\w*)?\)"
_VLLM = re.compile(rf"execute_(?:\d+_)?context_\d+{_TOKENS}_generation_(\d+){_TOKENS}$", re.ASCII)
_VLLM_REQUESTS = re.compile(r"execute_new_(\d{1,12})_cached_(\d{1,12})$", re.ASCII)


def _of_vllm(name: str) -> Iteration | None:
    if match := _VLLM.match(name):
        generating, scheduled = int(match[2]), int(match[3])
        return Iteration(int(match[1]), min(generating, scheduled), max(scheduled - generating, 0))
    if match := _VLLM_REQUESTS.match(name):
        new = UNKNOWN_TOKENS * (int(match[2]) > 0)
        return Iteration(UNKNOWN_TOKENS * (int(match[1]) > 0), new, new)
    return None


# SGLang (its model_executor/step_span_utils.py): ``step[EXTEND bs=<requests> toks=<tokens>]``, any
# other forward mode with its requests, and from PR 24911 on sums of query lengths by context and
# generation.
_SGLANG = re.compile(r"step\[(\w+) bs=(\d{1,12})(?: toks=(\d{1,12}))?", re.ASCII)
_SGLANG_SUMS = re.compile(r" c_sq=(\d{1,12}) .*g_sq=(\d{1,12}) ", re.ASCII)
_WITHOUT_FORWARD = ("IDLE", "PREBUILT")
_WITH_PROMPTS = ("MIXED", "SPLIT_PREFILL", "DLLM_EXTEND")


def _of_sglang(name: str) -> Iteration | None:
    """Return the tokens of an iteration of SGLang; the number of accepted draft tokens is
    unknown.
    """
    match = _SGLANG.match(name)
    if match is None:
        return None
    mode, requests = match[1], int(match[2])
    if not requests or mode in _WITHOUT_FORWARD:
        return Iteration(0, 0)
    if mode == "EXTEND":
        return Iteration(int(match[3] or 0), 0)
    if mode == "DECODE":
        return Iteration(0, requests)
    if sums := _SGLANG_SUMS.search(name):
        return Iteration(int(sums[1]), int(sums[2]))
    return Iteration(UNKNOWN_TOKENS * (mode in _WITH_PROMPTS), UNKNOWN_TOKENS, UNKNOWN_TOKENS)


ITERATION_NAMES: dict[re.Pattern[str], Callable[[str], Iteration | None]] = {
    re.compile(r"execute_\w*\d", re.ASCII): _of_vllm,
    re.compile(r"step\["): _of_sglang,
}
"""For each engine, how the names of its iterations begin, and the function that parses a name; it
returns ``None`` for a name that is not understood.
"""


def is_like_iteration(name: str) -> bool:
    """Return whether an annotation seems to be of an engine's iteration."""
    return any(begin.match(name) for begin in ITERATION_NAMES)


def parse_iteration(name: str) -> Iteration | None:
    """Parse the name of an engine iteration; ``None`` for other names."""
    for begin, parse in ITERATION_NAMES.items():
        if begin.match(name):
            return parse(name)
    return None


# Of context and generation: sums of query lengths (sq), of lengths with what is cached (sk), of
# squared query lengths, and of products of both.
_SUMS = re.compile(
    r"sq=?(\d{1,12})(?: ._)?sk=?(\d{1,12})(?: ._)?sqsq=?(\d{1,15})(?: ._)?sqsk=?(\d{1,15})",
    re.ASCII,
)


def attention_of(name: str) -> Attention:
    """Return the work of attention that the name of an engine iteration has.

    The last of ``q`` tokens of a sequence of ``k`` looks at ``k`` tokens, the one before it at
    ``k - 1``: these are ``q * k - q * (q - 1) / 2`` pairs.
    """
    sums = [tuple(map(int, match.groups())) for match in _SUMS.finditer(name)]
    if len(sums) != 2:
        return Attention()
    pairs = sum(products - (squares - queries) // 2 for queries, _, squares, products in sums)
    return Attention(pairs, sum(cached for _, cached, _, _ in sums))
