"""Reaches running jobs through the actors that they have made in a Ray cluster."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from verl_profiling.demand import Answer, Demand, LoopState, decode_message, encode_message
from verl_profiling.errors import ProfilingError
from verl_profiling.ray_cluster import connected
from verl_profiling.ray_mailbox import NAMESPACE
from verl_profiling.remote import is_url
from verl_profiling.visible import visible

__all__ = ["RayLine", "lines_through_ray"]

_ANSWER_S = 20.0


class _Gone(ProfilingError):
    """The actor is not there any more."""


class RayLine:
    """See :class:`~verl_profiling.commands.asking.Line`.

    Args:
        ray: The module.
        name: Name of the actor.

    Attributes:
        run_id: The run.
        begun: Which start of it, and when it was seen to begin a step.

    Raises:
        ProfilingError: There is no such actor.
    """

    ends_with_job = True

    def __init__(self, ray: Any, name: str) -> None:
        self._ray = ray
        self._name = name
        try:
            self._actor = ray.get_actor(name, namespace=NAMESPACE)
        except Exception as error:  # it is gone meanwhile
            raise _Gone(f"{name}: {error}") from error
        first = decode_message(self._call("state"), LoopState, name)
        self.run_id, self.begun = first.run_id, (0, first.begun_ns)
        self.place = first.place if is_url(first.place) else f"{first.process.host}:{first.place}"

    def state(self) -> LoopState | None:
        """See :meth:`Line.state`."""
        with contextlib.suppress(_Gone):
            return decode_message(self._call("state"), LoopState, self._name)
        return None

    def ask(self, demand: Demand) -> None:
        """See :meth:`Line.ask`."""
        if why := self._call("ask", encode_message(demand)):
            raise ProfilingError(f"refused: {why}")

    def cancel(self, request: str) -> None:
        """See :meth:`Line.cancel`."""
        self._call("cancel", request)

    def answer(self, request: str) -> Answer | None:
        """See :meth:`Line.answer`."""
        data = self._call("answer", request)
        return decode_message(data, Answer, f"{self._name}: answer") if data is not None else None

    def answers(self) -> list[Answer]:
        """See :meth:`Line.answers`."""
        return [decode_message(data, Answer, self._name) for data in self._call("answers")]

    def waiting(self) -> list[Demand]:
        """See :meth:`Line.waiting`."""
        return [decode_message(data, Demand, self._name) for data in self._call("waiting")]

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return self._ray.get(getattr(self._actor, method).remote(*arguments), timeout=_ANSWER_S)
        except self._ray.exceptions.GetTimeoutError:
            raise ProfilingError(
                f"actor {self._name} of the job does not answer within {_ANSWER_S:g} s; is its node alive?"
            ) from None
        except Exception as error:  # Ray has errors of its own
            reason = (str(error).splitlines() or [""])[0]
            raise _Gone(f"the job is gone, and its actor with it: {reason}") from error


def lines_through_ray(address: str) -> list[RayLine]:
    """Return the lines to all jobs of a cluster that can be asked; of several starts of a run, to the last.

    Raises:
        ToolUnavailableError: There is no Ray, or no cluster.
    """
    ray = connected("trigger", address, "jobs are asked")
    latest: dict[tuple[str, str], RayLine] = {}
    for found in ray.util.list_named_actors(all_namespaces=True):
        if found["namespace"] != NAMESPACE:
            continue
        try:
            line = RayLine(ray, found["name"])
        except _Gone:
            continue
        except ProfilingError as error:
            print(f"warning: {visible(str(error))}", file=sys.stderr)
            continue
        which = line.run_id, line.place
        latest[which] = max(latest.get(which, line), line, key=lambda one: one.begun)
    return sorted(latest.values(), key=lambda line: line.place)
