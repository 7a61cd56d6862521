"""How many requests a replica should get: the knee of its throughput over running requests.

One more running request makes each iteration of an engine longer, and makes one more token in it.
At first, twice as many requests make nearly twice as many tokens per second. Beyond the knee, they
make hardly more, and each response is late.
"""

from __future__ import annotations

import msgspec

from verl_profiling.predict.engine_fit import Engines
from verl_profiling.predict.replays import Replay

_GAIN = 0.25  # of tokens per second, that twice as many requests have to bring to be worth it


class Knee(msgspec.Struct, frozen=True, kw_only=True):
    """The knee of a replica.

    Attributes:
        few: Least requests that a replica usually ran at once in the capture.
        many: Most requests that a replica usually ran at once in the capture.
        requests: Requests from which on twice as many make less than a quarter more tokens per
            second; ``None`` if there is no such number up to ``many``.
        gain: Share of more tokens per second by the last doubling up to the knee, or ``many``.
        preempted: Number of requests that the engine preempted, as its KV cache was full.
        most: Most requests that a replica ran at once.
    """

    few: int
    many: int
    requests: int | None
    gain: float
    preempted: int
    most: int

    @property
    def wanted(self) -> str:
        """How many requests a replica should get at once, as text."""
        if self.requests is None:
            return f"over {self.many:,}"
        about = "at most" if self.requests == self.few else "about"  # fewer were not seen
        return f"{about} {self.requests:,}"

    @property
    def sentence(self) -> str:
        """The reason as text."""
        if self.requests is None:
            text = f"twice as many made {self.gain:.0%} more tokens/s"
        else:
            text = f"beyond, twice as many make under {_GAIN:.0%} more tokens/s"
        if self.preempted:
            text += f"; KV cache full at {self.most:,}"
        return text


def knee_of(recorded: Replay, engines: Engines) -> Knee | None:
    """Return the knee of a step's replicas; ``None`` if its requests do not show it.

    Args:
        recorded: The step with the recorded replicas.
        engines: The engines, as fitted to its requests.
    """
    if 2 * engines.few > engines.many:
        return None  # no number of requests and its double were seen
    gain, knee, running = 0.0, None, engines.few
    while 2 * running <= engines.many and knee is None:
        gain = _gain(engines, running)
        if gain < _GAIN:
            knee = running
        running *= 2
    requests = {id(one.request): one.request for _, one in recorded.graph.segments.requested()}
    return Knee(
        few=engines.few,
        many=engines.many,
        requests=knee,
        gain=gain,
        preempted=sum(bool(request and request.preemptions) for request in requests.values()),
        most=int(engines.load.running.max()),
    )


def _gain(engines: Engines, running: int) -> float:
    """Return the share of more tokens per second with twice as many running requests."""
    seconds = engines.curves[1]
    return float(2 * seconds[running] / seconds[2 * running] - 1)
