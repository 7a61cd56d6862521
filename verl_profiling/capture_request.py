"""A request for captures: its selection of workers, its origin, and its file.

A person's request is a file in ``requests/`` of the run's folder, which the job removes when it
reads the request. The outcome is in the manifests of the captures, or in a file with the reason of
a refusal. Any user with write permission may request captures, so a request has bounded size and a
fixed schema, without paths.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from verl_profiling.errors import ConfigError

REQUESTS = "requests"
"""Name of the folder of requests."""
REQUEST, REFUSED = ".json", ".refused"
"""Suffixes of the files of requests and of refusals; the stem is the request's id."""
MOST_STEPS = 100
"""Maximum number of steps of one request."""

Ranks = str | int | tuple[int, ...] | None
"""Ranks as users write them: ``"0,8-15"``, a number, or a list."""

_MOST_RANKS = 1 << 20

_Names = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...],
    msgspec.Meta(min_length=1, max_length=64),
]
_Numbers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)], ...],
    msgspec.Meta(min_length=1, max_length=4096),
]


class CaptureSelection(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Changes of the settings for one capture; ``None`` for no change.

    A role that records trajectories keeps its own tools and mode, unless the role is in ``roles``.

    Attributes:
        mode: ``e2e`` or ``discrete``, in all roles.
        tools: Names of the recording tools, in all roles.
        roles: The roles that take part, including roles that the settings leave out.
        ranks: Global accelerator ranks inside the role, including ranks that the settings leave
            out.
        replicas: Rollout replicas; ``ranks`` then apply to other roles only.
        stages: The recorded stages, in discrete mode.
    """

    mode: Literal["e2e", "discrete"] | None = None
    tools: _Names | None = None
    roles: _Names | None = None
    ranks: _Numbers | None = None
    replicas: _Numbers | None = None
    stages: _Names | None = None

    def in_words(self) -> str:
        """Return the selection as text: ``mode=discrete, ranks=0,3``; empty without changes."""
        said = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ", ".join(
            f"{name}={value if isinstance(value, str) else ','.join(map(str, value))}"
            for name, value in said
            if value is not None
        )


TriggerKind = Literal["schedule", "demand", "anomaly"]


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a capture: the schedule, a person, or the watch.

    Attributes:
        kind: ``schedule``: the settings. ``demand``: a person, during the run. ``anomaly``: the
            watch.
        reason: Reason as a sentence; on demand, the requested selection.
        by: Requester of a capture on demand, e.g. ``root@node1``, or ``SIGUSR2``.
        request: Id of the :class:`CaptureRequest`, for a capture on demand.
        sign: Kind of the anomaly that the watch detected, see ``files/watch_signs.py``.
        noticed: Number of the step with the anomaly.
        stage: The slow stage, if there is one; on demand, the only requested stage.
        span: Name of the slow span, if there is one.
        suspects: Lanes of the processes that may be the cause, e.g. ``actor_rank3``; the likeliest
            first.
        peers: Lanes of processes of the same role, captured for comparison.
        value: Measured value in the step with the anomaly: seconds, a share of the step, or bytes.
        median: Median of the values in the steps before, in the same unit.
        memory: Kind of the memory that grew, as in ``RoleMemory.kinds``; ``held`` for that
            of its device or allocator, empty for other signs.
        history: The values in the steps before, then the value in the step with the anomaly.
    """

    kind: TriggerKind = "schedule"
    reason: str = ""
    by: str = ""
    request: str = ""
    sign: str = ""
    noticed: int | None = None
    stage: str = ""
    span: str = ""
    suspects: list[str] = []
    peers: list[str] = []
    value: float = 0.0
    median: float = 0.0
    memory: str = ""
    history: list[float] = []

    def in_words(self) -> str:
        """Return the reason, with the requester of a capture on demand."""
        who = f"requested by {self.by}: " if self.by else ""
        return f"{who}{self.reason}"


class CaptureRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for captures.

    Attributes:
        id: Random id, made by the requester; also the stem of the file.
        by: The requester, e.g. ``root@node1``.
        request_ns: Time of the request, on the requester's clock.
        steps: Number of consecutive steps.
        selection: Changes of the settings for these captures.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""
    request_ns: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 1
    selection: CaptureSelection = CaptureSelection()


def new_request_id() -> str:
    """Return a unique request id."""
    return uuid.uuid4().hex[:12]


def coordinates_in(value: Ranks, key: str) -> frozenset[int] | None:
    """Parse indexes in a parallel dimension, such as ``pp``, like :func:`parse_ranks`.

    Negative numbers count from the end; ``-1`` is the last index.
    """
    if value is None or isinstance(value, str):
        return parse_ranks(value, key)
    listed = (value,) if isinstance(value, int) else value
    parse_ranks(tuple(map(abs, listed)), key)
    return frozenset(listed)


def parse_ranks(value: Ranks, key: str) -> frozenset[int] | None:
    """Return the ranks in ``"0,8-15"``, ``3`` or ``[0, 1]``; ``None`` stays ``None``.

    Args:
        value: The ranks as the user wrote them.
        key: Name of the setting or option, for errors.

    Raises:
        ConfigError: The value has another form.
    """
    if value is None:
        return None
    if isinstance(value, int):
        value = (value,)
    if isinstance(value, str):
        value = tuple(_ranks_in(value, key))
    if not value:
        raise ConfigError(
            key, 'selects nothing; leave it out to select all, or write e.g. "0,8-15"'
        )
    if min(value) < 0:
        raise ConfigError(key, f"rank {min(value)} is negative")
    return frozenset(value)


def _ranks_in(text: str, key: str) -> Iterator[int]:
    room = _MOST_RANKS
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low = int(first)
            high = int(last) if dash else low
        except ValueError:
            other = ", or one_per_pp_stage" if key.endswith("ranks") else ""
            raise ConfigError(
                key, f'{text!r} is not a list of ranks; write e.g. "0,8-15"{other}'
            ) from None
        room -= high - low + 1
        if high < low or room < 0:
            raise ConfigError(key, f'{part.strip()!r} is not a range of ranks; write e.g. "8-15"')
        yield from range(low, high + 1)
