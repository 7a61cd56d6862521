"""Divides the idle time of lanes by cause; every idle instant has exactly one cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.manifest import WAIT_FOR_REQUESTS, WEIGHT_SYNC, StageSpan
from verl_profiling.numbers.report_columns import OTHER_RANKS, DeviceRow, LostRow, Tail, sum_of
from verl_profiling.slices.intervals import (
    EMPTY,
    Spans,
    grouped,
    intersection,
    length,
    spans_of,
    subtract,
    time_of,
    union,
    within,
)
from verl_profiling.slices.observed import between_ends
from verl_profiling.steps.lanes import Lane, Step
from verl_profiling.steps.requests import VALIDATE
from verl_profiling.units import duration

CAUSES = (
    "weight_sync",
    "long_tail",
    "after_generation",
    "waiting_for_rollout",
    "no_requests",
    "queued",
    "straggler_wait",
    "gc",
    "host_blocked",
    "host_bound",
    "other_stages",
    "between_stages",
    "unexplained",
)
"""Causes of idle time, in order of precedence."""

_SAID = {"host_bound": "the host launched no work", "other_stages": "waiting for its turn"}
BEHIND_TRAJECTORIES = ("long_tail", "after_generation", "no_requests")
"""Causes of idle time that are divided further, by the causes of trajectories at the same time,
e.g. a tool that the last trajectories call.
"""


def cause_name(cause: str) -> str:
    """Return the name of a cause in the report, e.g. ``long tail``."""
    return _SAID.get(cause, cause.replace("_", " "))


def lost_by_cause(lane: Lane, step: Step, tail: Tail | None) -> dict[str, Spans]:
    """Partition a lane's idle time ``I`` by cause. If several causes apply, the first in this list
    counts.

    * ``weight_sync``: during ``update_weights``, the controller's or the lane's own;
    * ``long_tail``: during the rollout, until the end of the last replica: for a training rank
      after the end of half of the replicas, for another engine after its own last iteration. A
      training rank in a stage of its own waits for no replica, here and in the next two causes;
    * ``after_generation``: during the rollout, after the last replica was done;
    * ``waiting_for_rollout``: the rest of the rollout, for a training rank; for an engine, the
      time before its first iteration;
    * ``no_requests``: in stages with generation, while the engine's replica has no request, if
      requests are known;
    * ``queued``: while all requests of the engine's replica are in its queue, so that it is paused
      or full of others, if their times are known;
    * ``straggler_wait``: after the end of an own stage, until the last worker of the role ends this
      stage;
    * ``gc``: while Python's garbage collector stops the process;
    * ``host_blocked``: while the host is in a call that copies, allocates or waits for the device;
    * ``host_bound``: in an own stage (for an engine, between iterations or with an unfinished
      request), or while operators run on the host: the device waits for launches;
    * ``other_stages``: the controller is in a stage in which the lane does not take part;
    * ``between_stages``: the controller is in no stage;
    * ``unexplained``: the rest.
    """
    rollout = step.rollout
    own_time = time_of(span for span in lane.stages if span.name != ROLLOUT)
    claims = dict.fromkeys(CAUSES, EMPTY)
    claims["weight_sync"] = time_of([*step.stages, *lane.stages], WEIGHT_SYNC)
    half_done = all_done = step.end_ns
    if tail is not None:
        ends_us = (tail.median_finish_us, tail.last_finish_us)
        half_done, all_done = (int(rollout[0, 0]) + round(us * 1000) for us in ends_us)
    if lane.is_engine:
        work = working_spans(lane, step, ROLLOUT)
        held = EMPTY
        if len(work):
            first, last = int(work[0, 0]), int(work[-1, 1])
            held = within(rollout, last, all_done)  # its last responses are returned
            if tail is not None and tail.last_replica != lane.source.replica:
                claims["long_tail"] = held
                held = EMPTY
            claims["after_generation"] = within(rollout, max(last, all_done), step.end_ns)
            claims["waiting_for_rollout"] = within(rollout, step.begin_ns, first)
        generating = working_spans(lane, step, ROLLOUT, VALIDATE)
        if (replica := lane.source.replica) in step.served:
            alone = union(rollout, generating, step.during(WAIT_FOR_REQUESTS))
            claims["no_requests"] = subtract(alone, step.served[replica])
            generating = union(generating, step.served[replica])
            claims["queued"] = step.queued(replica)
        claims["host_bound"] = union(generating, own_time, held)
    else:
        rollout = subtract(rollout, own_time)  # in an asynchronous loop, ranks work beside it
        claims["long_tail"] = within(rollout, half_done, all_done)
        claims["after_generation"] = within(rollout, all_done, step.end_ns)
        claims["waiting_for_rollout"] = rollout
        claims["straggler_wait"] = union(*_after_stages(lane, step))
        claims["host_bound"] = union(own_time, lane.host)
    claims["gc"] = lane.pauses
    if lane.on_device:
        claims["host_blocked"] = lane.blocked
    claims["other_stages"] = step.during()
    if step.manifest:
        claims["between_stages"] = subtract(step.whole, step.during())
    claims["unexplained"] = lane.observed
    return partition(subtract(lane.observed, lane.busy), claims)


def partition(time: Spans, claims: Mapping[str, Spans]) -> dict[str, Spans]:
    """Divide a time among causes by the time that each claims; an instant goes to the first one."""
    parts = {}
    for cause, claim in claims.items():
        parts[cause] = intersection(time, claim)
        time = subtract(time, claim)
    return parts


def working_spans(lane: Lane, step: Step, *stages: str) -> Spans:
    """Return the spans from an engine's first iteration to its last, in each run of the given
    stages.

    Without iterations, operators are used. In a step without these stages, there is one span.
    Otherwise the rest of the step is left out, because the engine may load weights there.
    """
    work = union(lane.iterations[:, :2])
    runs = step.during(*stages)
    if not len(work):
        work = lane.busy
    if not len(runs):
        runs = step.whole
    return between_ends(work, runs)


def sync_parts(step: Step, devices: Iterable[Sequence[Lane]]) -> dict[str, float]:
    """Return the seconds that devices lose to ``weight_sync``, by stage inside ``update_weights``.

    An instant belongs to the innermost such stage of the device's own process; else of the
    controller, else of another process, for which all others wait.

    Args:
        step: The step.
        devices: The lanes of each device.
    """
    of_workers = chain.from_iterable(map(attrgetter("stages"), step.workers))
    shared = [*_inside_sync(step.stages), *_inside_sync(list(of_workers))]
    total_ns = Counter[str]()
    for lanes in devices:
        window = EMPTY
        parts: list[tuple[str, Spans]] = []
        for lane in lanes:
            window = union(window, lane.idle["weight_sync"])
            parts += _inside_sync(lane.stages)
        for name, spans in parts + shared:
            total_ns[name] += length(intersection(window, spans))
            window = subtract(window, spans)
        total_ns[WEIGHT_SYNC] += length(window)
    return {name: ns / 1e9 for name, ns in total_ns.items() if ns}


def _inside_sync(stages: Sequence[StageSpan]) -> list[tuple[str, Spans]]:
    """Return the time of each stage inside ``update_weights``, the innermost stages first."""
    whole = time_of(stages, WEIGHT_SYNC)
    outer = min((span.depth for span in stages if span.name == WEIGHT_SYNC), default=0)
    inner = [span for span in stages if span.depth > outer and span.name != WEIGHT_SYNC]
    runs = grouped(inner, lambda span: (-span.depth, span.name))
    return [(name, intersection(whole, time_of(runs[depth, name]))) for depth, name in sorted(runs)]


def last_aborted(step: Step) -> Iterator[str]:
    """Yield a note for each stage ``abort`` or ``drain``,
    with the request that ended last in it.
    """
    for span in step.stages:
        if span.name not in ("abort", "drain"):
            continue
        begin_us = (span.begin_ns - step.begin_ns) / 1000
        end_us = (span.end_ns - step.begin_ns) / 1000
        ended = [request for request in step.requests if begin_us < request.end_us <= end_us]
        if ended:
            last = max(ended, key=lambda request: request.end_us)
            took = duration((end_us - begin_us) / 1e6)
            after = duration((last.end_us - begin_us) / 1e6)
            yield (
                f"{span.name} took {took}: its last request, {last.id} of {last.worker}, "
                f"took {after}"
            )


def _after_stages(lane: Lane, step: Step) -> Iterator[Spans]:
    """Yield for each stage the time between its end on a lane and on the last worker
    of the role.
    """
    peers = []
    for peer in step.lanes:
        if peer.source.role == lane.source.role:
            peers.append(grouped(peer.stages, attrgetter("name")))
    for name, runs in grouped(lane.stages, attrgetter("name")).items():
        yield until_last(runs, [stages.get(name, []) for stages in peers])


def until_last(runs: list[StageSpan], peers: Iterable[list[StageSpan]]) -> Spans:
    """Return the time between the end of each run of a stage and the end of this run
    on the last peer.
    """
    last_ns = [span.end_ns for span in runs]
    for of_peer in peers:
        for index, span in enumerate(of_peer[: len(runs)]):
            last_ns[index] = max(last_ns[index], span.end_ns)
    return spans_of(zip(map(attrgetter("end_ns"), runs), last_ns, strict=True))


def lost_total(rows: Sequence[DeviceRow], parts: Mapping[str, dict[str, float]]) -> list[LostRow]:
    """Sum the lost seconds of all devices by cause; shares are of their observed time.

    Args:
        rows: The devices.
        parts: Seconds of a cause by what happened meanwhile, e.g. of ``weight_sync`` by stage.
    """
    observed = sum_of(rows, "span_us") or 1.0
    lost = []
    for cause in (*CAUSES, OTHER_RANKS):
        # To the nanosecond: an error of floats is no lost time.
        total_us = round(sum(row.lost_us[cause] for row in rows), 3)
        if total_us or cause == "unexplained":
            row = LostRow(
                cause=cause,
                seconds=total_us / 1e6,
                share=total_us / observed,
                parts=parts.get(cause, {}),
            )
            lost.append(row)
    return sorted(lost, key=lambda row: (row.cause == "unexplained", -row.seconds))


def unlogged_requests(step: Step) -> Iterator[str]:
    """Yield notes on engines without logged requests, whose time without requests is unknown."""
    engines = [lane.source for lane in step.lanes if lane.is_engine]
    silent = dict.fromkeys(source.worker for source in engines if source.replica not in step.served)
    if silent and step.manifest:
        yield (
            f"requests of {', '.join(silent)} were not logged: idle time without requests cannot "
            "be told from time in which the host did not launch work"
        )
