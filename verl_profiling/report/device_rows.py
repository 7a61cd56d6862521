"""Devices: what lanes that share one did together, so that it counts once.

In colocated training a GPU is used by a training rank and by a rank of a rollout engine in turn. Both are
lanes; time is that of the device. Let ``S`` be the time in which any of its lanes was observed, and ``B`` the
time in which any was busy. Its idle time ``S - B`` has the causes that its lanes' idle time has; where these
differ, the cause of a lane that takes part in what goes on counts before that of one that waits its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verl_profiling.report.intervals import EMPTY, Spans, intersection, length, subtract, union
from verl_profiling.report.lanes import Lane, Step
from verl_profiling.report.lost import CAUSES
from verl_profiling.report.model import OTHER_RANKS
from verl_profiling.report.rows import DeviceRow

__all__ = ["device_row", "lost_of_device", "shared_devices", "unknown_devices"]

_NAMED = 4
_TURNS = (
    *("capture", "weight_sync", "straggler_wait", "host_blocked", "host_bound"),
    *("no_requests", "long_tail", "after_generation", "waiting_for_rollout"),
    *("other_stages", "between_stages", "unexplained"),
)
"""The causes of idle time in order of precedence among the lanes of a device."""


def shared_devices(step: Step) -> list[list[Lane]]:
    """Return the lanes of each device, in the order of the step's lanes.

    Lanes are on one device if its UUID says so, or else its number on its host. A lane of which neither is
    known is on a device of its own.
    """
    uuids = {lane.device.place: lane.device.uuid for lane in step.lanes if lane.device and lane.device.uuid}
    found: dict[object, list[Lane]] = {}
    for number, lane in enumerate(step.lanes):
        device = lane.device
        uuid = (device.uuid or (uuids.get(device.place) if device.place else "")) if device else ""
        key = uuid or (device.place if device else "") or number
        found.setdefault(key, []).append(lane)
    return list(found.values())


def lost_of_device(lanes: Sequence[Lane], lost: Sequence[Mapping[str, Spans]]) -> dict[str, Spans]:
    """Partition the idle time of a device by cause.

    Args:
        lanes: Its lanes.
        lost: The idle time of each by cause.
    """
    left = subtract(union(*(lane.observed for lane in lanes)), union(*map(_busy, lanes)))
    found = {}
    for cause in _TURNS:
        found[cause] = intersection(left, union(*(causes[cause] for causes in lost)))
        left = subtract(left, found[cause])
    return {cause: found[cause] for cause in CAUSES}


def device_row(lanes: Sequence[Lane], lost: Mapping[str, Spans], waiting: Mapping[str, Spans]) -> DeviceRow:
    """Return how a device spent its time, in microseconds.

    Args:
        lanes: Its lanes.
        lost: Its idle time by cause.
        waiting: When each lane waited in collectives, by its name.
    """
    observed = union(*(lane.observed for lane in lanes))
    compute = union(*(intersection(lane.activity.compute, lane.observed) for lane in lanes))
    communication = union(*(intersection(lane.activity.communication, lane.observed) for lane in lanes))
    busy = union(*map(_busy, lanes))
    waits = [intersection(waiting.get(lane.name, EMPTY), lane.observed) for lane in lanes]
    works = union(*(subtract(_busy(lane), wait) for lane, wait in zip(lanes, waits, strict=True)))
    waiting_us = length(subtract(union(*waits), works)) / 1000
    lost_us = {cause: length(spans) / 1000 for cause, spans in lost.items()}
    known = next((lane.device for lane in lanes if lane.device is not None), None)
    return DeviceRow(
        name=lanes[0].name if len(lanes) == 1 else " + ".join(lane.name for lane in lanes),
        kind=known.kind if known else "",
        uuid=next((lane.device.uuid for lane in lanes if lane.device and lane.device.uuid), ""),
        place=next((lane.device.place for lane in lanes if lane.device and lane.device.place), ""),
        lanes=[lane.name for lane in lanes],
        roles=list(dict.fromkeys(lane.source.role for lane in lanes)),
        device=any(lane.activity.on_device for lane in lanes),
        graphs=any(lane.activity.graphs for lane in lanes),
        span_us=length(observed) / 1000,
        busy_us=length(busy) / 1000,
        idle_us=(length(observed) - length(busy)) / 1000,
        exposed_communication_us=length(subtract(communication, compute)) / 1000,
        waiting_us=waiting_us,
        host_bound_us=lost_us["host_bound"],
        lost_us={**lost_us, OTHER_RANKS: waiting_us},
    )


def unknown_devices(step: Step) -> Iterator[str]:
    """Yield a note on lanes that may share a device with others, of which nothing says so."""
    lanes = [lane for lane in step.lanes if lane.activity.on_device]
    unknown = [lane.name for lane in lanes if not (lane.device and (lane.device.uuid or lane.device.place))]
    if unknown and len({lane.is_engine for lane in lanes}) == 2:
        named = ", ".join(unknown[:_NAMED]) + (" and others" if len(unknown) > _NAMED else "")
        yield f"which devices {named} computed on is not known: each counts as a device of its own"


def _busy(lane: Lane) -> Spans:
    return intersection(lane.activity.busy, lane.observed)
