"""The reasons why the last response of a rollout is later than others: sent later, a queue, a
prompt that is not cached, more tokens, slower tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, compress
from operator import attrgetter
from statistics import fmean

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.numbers.report_columns import LateResponse, PartRow
from verl_profiling.slices.intervals import holding
from verl_profiling.steps.lanes import Step

SENT, LENGTH, SPEED = "sent later", "more tokens", "slower tokens"
"""Reasons that are no part of a request; the others are, such as ``queued``."""
_GENERATING = ("decode", "generate")  # parts of a request that make its tokens


def late_response(step: Step) -> LateResponse | None:
    """Return the response that ended last, compared with the last ones of the other replicas.

    Of one replica, it is compared with all its other responses. ``None`` if there are none.
    """
    requests = chain.from_iterable(map(attrgetter("requests"), step.workers))
    served = [one for one in requests if not (one.failed or one.ends_with_batch)]
    begins = np.array([request.begin_ns for request in served], np.int64)
    served = list(compress(served, holding(step.rollout, begins)))
    if len(served) < 2:
        return None
    served.sort(key=attrgetter("end_ns"))
    last = served.pop()
    last_of = {request.replica: request for request in served}
    last_of.pop(last.replica, None)
    peers = list(last_of.values()) or served
    usual_tokens = fmean(map(attrgetter("response_tokens"), peers))
    last_s, usual_s = _parts([last], step.begin_ns), _parts(peers, step.begin_ns)
    more = {name: last_s[name] - usual_s[name] for name in {**last_s, **usual_s}}
    pace_s = sum(usual_s[name] for name in _GENERATING) / max(usual_tokens, 1.0)
    more[LENGTH] = (last.response_tokens - usual_tokens) * pace_s
    more[SPEED] = sum(more.pop(name, 0.0) for name in _GENERATING) - more[LENGTH]
    late_s = sum(more.values())
    return LateResponse(
        replica=last.replica,
        seconds=late_s,
        others=len(peers),
        one_per_replica=bool(last_of),
        tokens=last.response_tokens,
        usual_tokens=usual_tokens,
        preemptions=last.preemptions or 0,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        parts=[
            PartRow(cause=cause, seconds=seconds, share=seconds / (late_s or 1.0))
            for cause, seconds in sorted(more.items(), key=lambda item: -item[1])
        ],
    )


def _parts(requests: Sequence[Request], begin_ns: int) -> defaultdict[str, float]:
    """Return the mean time of each part of requests, from the begin of the step (s)."""
    sums = defaultdict[str, float](float)
    for request in requests:
        for name, since_ns, until_ns in ((SENT, begin_ns, request.begin_ns), *request.parts()):
            sums[name] += (until_ns - since_ns) / 1e9 / len(requests)
    return sums
