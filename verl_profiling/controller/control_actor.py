"""The loop's side of the Ray actor that is asked for captures. Nothing in it may end or delay the loop."""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import Future
from typing import Any

from verl_profiling.demand import Answer, Demand, LoopState, decode_message, encode_message
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import safe_name
from verl_profiling.ray_cluster import check_in_cluster
from verl_profiling.ray_mailbox import NAMESPACE, Mailbox, Taken
from verl_profiling.visible import visible

__all__ = ["ControlActor"]

logger = logging.getLogger(__name__)

_LAST_WORD_S = 2.0
_MOST_SAID = 20


class ControlActor:
    """Takes requests, and leaves answers and a sign of life.

    One call for what comes is always under way. The loop looks whether it has returned, and waits for none;
    what it leaves is sent, and not waited for either. The actor ends with the job, or when this object goes.

    Args:
        run_id: The run; its next start makes an actor of another name.
    """

    def __init__(self, run_id: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        made = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(Mailbox)
        name = f"{safe_name(run_id)}-{uuid.uuid4().hex[:8]}"
        self._ray: Any = ray
        self._actor: Any = made.options(name=name, namespace=NAMESPACE).remote()
        self._said: set[str] = set()
        self._taken: Future[Taken] | None = None
        self._listen()

    def has_changed(self) -> bool:
        """Return whether something has come."""
        return self._taken is not None and self._taken.done()

    def take(self) -> tuple[list[Demand], list[str]]:
        """Return the requests that came, the eldest first, and the ids of those to be cancelled."""
        if not self.has_changed():
            return [], []
        assert self._taken is not None
        try:
            found, cancelled, rejected = self._taken.result()
        except Exception as error:  # Ray has errors of its own
            self._lost(error)
            return [], []
        self._listen()
        demands: list[Demand] = []
        for data in found:
            try:
                demands.append(decode_message(data, Demand, "the request"))
            except TraceFormatError as error:
                rejected.append(str(error))
        for why in rejected[:1]:
            self._say(f"what came to the actor is no request for a capture: {why}", once="rejected")
        return sorted(demands, key=lambda demand: demand.asked_ns), cancelled

    def answer(self, answer: Answer) -> None:
        """Leave an answer."""
        self._send("give", answer.demand.id, encode_message(answer))

    def answers(self) -> list[Answer]:
        """Return nothing: what an earlier start of the run has answered went with it."""
        return []

    def beat(self, state: LoopState, wait: bool = False) -> None:
        """Leave a sign of life.

        Args:
            state: The sign.
            wait: If training has ended, wait until all is there that was sent, for two seconds at most.
        """
        sent = self._send("beat", encode_message(state))
        if wait and sent is not None and state.ended_ns is not None:
            try:
                self._ray.wait([sent], timeout=_LAST_WORD_S)
            except Exception as error:
                self._lost(error)

    def _listen(self) -> None:
        sent = self._send("take")
        self._taken = sent.future() if sent is not None else None

    def _send(self, method: str, *arguments: object) -> Any:
        """Call the actor; return the reference, or nothing if that is not possible any more."""
        if self._actor is None:
            return None
        try:
            check_in_cluster()
            return getattr(self._actor, method).remote(*arguments)
        except Exception as error:
            self._lost(error)
            return None

    def _lost(self, error: Exception) -> None:
        self._actor = self._taken = None
        reason = (str(error).splitlines() or [""])[0]
        self._say(f"captures cannot be asked for through Ray any more: {type(error).__name__}: {reason}")

    def _say(self, text: str, once: str = "") -> None:
        if (once or text) not in self._said and len(self._said) < _MOST_SAID:
            self._said.add(once or text)
            logger.warning("%s", visible(text))
