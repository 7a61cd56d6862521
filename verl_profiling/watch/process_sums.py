"""The records of one process for the watch: stages, memory after each stage, and sums of spans.

The code is fast, because every stage and every span of every step ends here.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Protocol

import msgspec

from verl_profiling import clock
from verl_profiling.files.host_use import MachineUse, ProcessUse
from verl_profiling.files.step_summary import OTHERS, Period, RankUse, SpanTotal
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import GC, MAX_NS, WEIGHT_SYNC, Work
from verl_profiling.watch.collectives import collectives_in
from verl_profiling.watch.lessons import MOST_ENDED, EndedTrajectories
from verl_profiling.watch.stage_memory import StageMemory

STAGES_OF_A_STEP = 16
"""Number of ended outermost stages that a process keeps for each step that the watch keeps."""

MOST_PERIODS = 256
"""Maximum number of periods (begin and end) of all stages in a step: 8 KB. Each stage gets an equal
share. Further runs of a stage extend its last period, which then covers other stages.
"""

MOST_NAMES = 256
"""Maximum number of names, of stages in a step and of spans;
further names are summed as ``OTHERS``.
"""

MOST_SLICES = 512
"""Maximum number of time slices of span sums; at this number, neighbours are merged."""

_LONGEST_NAME = 200
_SHORTEST_SLICE_NS = 20_000_000  # doubled whenever the slices are too many
_TOUCHING_NS = 1_000_000  # runs of a stage with a shorter gap are one
_SLACK_NS = 50_000_000  # a stage that ended so long before the first requested step is dropped
_SMALL_PART = 100
"""The part of a stage in a step counts from 1/100 of the stage; while it is open, of the step."""

NO_LOOKS = ("", 0.0)
"""Value of ``WatchQuestion.hangs`` with which a process stops polling for the loop's file."""

_USES = msgspec.msgpack.Decoder(list[RankUse | None])


class WatchQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The watch's request for the stages of a process in some steps.

    Attributes:
        steps: Begin and end of each step, on the clock of the loop's process.
        offsets_ns: Measured clock offsets by clock domain: the domain's clock minus the loop's
            clock.
        collectives: Whether the collectives that the process entered are requested, too.
        hangs: Folder of the files of hangs, and the pause between two polls for the loop's file
            there (s);
            :data:`NO_LOOKS` once training has ended.
        has_start: Whether the first step is the start-up.
    """

    steps: list[Period] = []
    offsets_ns: dict[str, int] = {}
    collectives: bool = False
    hangs: tuple[str, float] | None = None
    has_start: bool = False


class WatchReading(msgspec.Struct, frozen=True, kw_only=True):
    """The reply: the stages of a process in the requested steps.

    Attributes:
        identity: The worker.
        process: The process; a restarted worker has another process.
        steps: A ``RankUse`` or ``null`` for each step, as msgpack; ``None`` until its clock offset
            is measured.
        received_ns: Arrival of the call, on the clock of the process.
        replied_ns: Sending of the reply, on the same clock.
    """

    identity: WorkerIdentity
    process: ProcessId
    steps: bytes | None = None
    received_ns: int
    replied_ns: int

    def uses(self) -> list[RankUse | None]:
        """Decode ``steps``."""
        return _USES.decode(self.steps or b"")


class Begun(msgspec.Struct, eq=False, gc=False):
    """Name and begin of a stage or call.

    With ``gc=False``, creating it never triggers the garbage collector.
    """

    name: str
    begin_ns: int


class StageWithWork(Protocol):
    """A stage whose work may be known, such as its tokens; it may still be open."""

    name: str
    begin_ns: int
    work: Work | None


class StageSums:
    """Records the outermost stages of this process. Callers add parts of weight updates to
    :attr:`spans`.

    All methods may be called from any thread and task.

    Args:
        most: Number of ended stages that are kept.

    Attributes:
        spans: Sums of the process's trajectories and spans.
        ended: The outermost stages that have ended: name, begin, end, peak and held memory.
        open: The outermost stages that are open, by ``id()`` of the object.
        given: The last outermost stages with known work, in order.
        tokens: Functions whose value changes when an engine makes a token: the engine makes
            progress.
        use: The last reading of the process and of its machine; ``None`` before.
        memory: Its memory after each stage, and that of its device.
    """

    def __init__(self, most: int) -> None:
        self.spans = SpanSums()
        self.ended: deque[tuple[str, int, int, int, int]] = deque(maxlen=most)
        self.open: dict[int, Begun] = {}
        self.given: deque[StageWithWork] = deque(maxlen=most)
        self.tokens: list[Callable[[], object]] = []
        self.use: tuple[ProcessUse, MachineUse] | None = None
        self.memory = StageMemory()
        self._since_ns = clock.now_ns()

    def end(self, stage: Begun, end_ns: int) -> None:
        """Record an outermost stage that has ended."""
        self.open.pop(id(stage), None)
        name, begin_ns = stage.name, stage.begin_ns
        peak, held = self.memory.ended(name, begin_ns, end_ns)
        self.ended.append((name, begin_ns, max(begin_ns, end_ns), peak, held))

    def last_ns(self) -> int:
        """Return the last time at which a kept stage or span began or ended; 0 if none is kept."""
        times = [stage.begin_ns for stage in [*self.open.values()]]
        with suppress(IndexError):
            times.append(self.ended[-1][2])
        return max([*times, self.spans.last_ns()])

    def of_steps(
        self, who: RankUse, steps: Sequence[Period], ahead_ns: int = 0, collectives: bool = False
    ) -> list[RankUse | None]:
        """Return stages, memory and spans of the process in each step; ``None`` before it began.

        A stage that crosses the end of a step is divided between both steps. An open stage counts
        until now.

        Args:
            who: Lane, role, rank and replica of the process.
            steps: Begin and end of each step, in order, on the clock of the loop's process.
            ahead_ns: Clock offset: this process's clock minus the loop's. Results are on the loop's
                clock.
            collectives: Whether the collectives that the process entered are added.
        """
        now_ns = clock.now_ns() - ahead_ns
        self._since_ns = min(self._since_ns, now_ns + ahead_ns)  # the clock may be set back
        runs: list[dict[str, list[Period]]] = [{} for _ in steps]
        memory = self._ended_in(steps, ahead_ns, runs)
        for stage in list(self.open.values()):
            _divide(runs, stage.name, stage.begin_ns - ahead_ns, now_ns, steps, is_open=True)
        totals = self.spans.of_steps(steps, ahead_ns)
        groups = self.spans.ended.of_steps(steps, ahead_ns)
        entered = collectives_in(steps, ahead_ns) if collectives else [None] * len(steps)
        given = self._given_in(steps, ahead_ns) if steps else []
        devices = self.memory.of_steps(steps, ahead_ns)
        uses: list[RankUse | None] = []
        for at, (_, end_ns) in enumerate(steps):
            if end_ns < self._since_ns - ahead_ns:
                uses.append(None)
                continue
            stages, packed = packed_stages(runs[at])
            peak, held = memory[at]
            is_last = at == len(steps) - 1
            use = msgspec.structs.replace(
                who,
                stages=stages,
                runs=packed,
                peak_bytes=peak or None,
                held_bytes=held or None,
                spans=totals[at],
                collectives=entered[at],
                counts={**self.spans.counts} or None if is_last else None,
                work=given[at],
                host_use=self.use if is_last else None,
                groups=groups[at],
                device=devices[at],
            )
            uses.append(use)
        return uses

    def _ended_in(
        self, steps: Sequence[Period], ahead_ns: int, runs: list[dict[str, list[Period]]]
    ) -> list[tuple[int, int]]:
        """Add the ended stages to ``runs``; return peak and last memory (bytes) of each step."""
        memory = [(0, 0)] * len(steps)
        first_ns = steps[0][0] + ahead_ns if steps else clock.now_ns()
        while self.ended and self.ended[0][2] < first_ns - _SLACK_NS:
            self.ended.popleft()  # no earlier steps are requested any more
        for name, begin_ns, end_ns, peak, held in reversed(list(self.ended)):
            at = _divide(runs, name, begin_ns - ahead_ns, end_ns - ahead_ns, steps)
            if peak and at is not None:
                memory[at] = max(peak, memory[at][0]), memory[at][1] or held
        return memory

    def _given_in(self, steps: Sequence[Period], ahead_ns: int) -> list[dict[str, Work] | None]:
        """Return the work of the stages that began in each step, by stage."""
        while self.given and self.given[0].begin_ns - ahead_ns < steps[0][0] - _SLACK_NS:
            self.given.popleft()  # no earlier steps are requested any more
        found: list[dict[str, Work] | None] = [None] * len(steps)
        for stage in list(self.given):
            begin_ns = stage.begin_ns - ahead_ns
            at = bisect_right(steps, begin_ns, key=_begin_of) - 1
            if stage.work is not None and at >= 0 and begin_ns <= steps[at][1]:
                of_step = found[at] = found[at] or {}
                name = _name_in(of_step, stage.name)
                known = of_step.get(name)
                of_step[name] = stage.work if known is None else known + stage.work
        return found

    def read(self, identity: WorkerIdentity, question: WatchQuestion) -> WatchReading:
        """Return the reply of a worker of this process to a request of the watch."""
        clock.follow()
        received_ns = clock.now_ns()
        steps = None
        ahead_ns = question.offsets_ns.get(identity.clock_domain)
        if ahead_ns is not None:
            lane, replica = identity.lane(), identity.replica
            who = RankUse(lane=lane, role=identity.role, rank=identity.rank, replica=replica)
            uses = self.of_steps(who, question.steps, ahead_ns, question.collectives)
            steps = msgspec.msgpack.encode(uses)
        return WatchReading(
            identity=identity,
            process=ProcessId.current(),
            steps=steps,
            received_ns=received_ns,
            replied_ns=clock.now_ns(),
        )


def _divide(
    runs: list[dict[str, list[Period]]],
    name: str,
    begin_ns: int,
    end_ns: int,
    steps: Sequence[Period],
    is_open: bool = False,
) -> int | None:
    """Add a run of a stage to each overlapping step; return the index of the last such step."""
    last = None
    since = max(bisect_right(steps, (begin_ns, MAX_NS)) - 1, 0)
    for at in range(since, len(steps)):
        first_ns, last_ns = steps[at]
        if first_ns <= begin_ns and end_ns <= last_ns and not is_open:  # most runs are in one step
            runs[at].setdefault(_name_in(runs[at], name), []).append((begin_ns, end_ns))
            return at
        if first_ns > end_ns:
            break
        step_ns = last_ns - first_ns
        first_ns, last_ns = max(first_ns, begin_ns), min(last_ns, end_ns)
        least_ns = step_ns if is_open else min(end_ns - begin_ns, _SMALL_PART * step_ns)
        if not is_open and _SMALL_PART * (end_ns - last_ns) < last_ns - first_ns:
            last_ns = end_ns  # the small rest counts in this step
        if first_ns <= last_ns and _SMALL_PART * (last_ns - first_ns) >= least_ns:
            runs[at].setdefault(_name_in(runs[at], name), []).append((first_ns, last_ns))
            last = at
    return last


def _name_in(stages: Mapping[str, object], name: str) -> str:
    """Return a name as it is shown; beyond the maximum number of names, ``OTHERS``."""
    if name in stages:
        return name
    shown = name[:_LONGEST_NAME].replace("\n", " ")
    return shown if shown in stages or len(stages) < MOST_NAMES else OTHERS


def packed_stages(stages: Mapping[str, Sequence[Period]]) -> tuple[str, bytes]:
    """Return ``stages`` and ``runs`` of a :class:`RankUse`,
    from begin and end of each run of each stage.
    """
    each = sorted([(sorted(times), name) for name, times in stages.items()])
    rows: list[int] = []
    most = max(1, MOST_PERIODS // max(1, len(each)))
    for number, (times, _) in enumerate(each):
        left = most
        for begin_ns, end_ns in times:
            if left == most or (left and begin_ns - rows[-2] > _TOUCHING_NS):
                rows += number, begin_ns, end_ns, end_ns - begin_ns
                left -= 1
            else:  # the runs of two tasks overlap
                rows[-1] += max(0, end_ns - max(begin_ns, rows[-2]))
                rows[-2] = max(rows[-2], end_ns)
    return "\n".join([name for _, name in each]), array("q", rows).tobytes()


_Sums = dict[str, list[int]]
"""Number, total duration (ns), failures and tokens of spans, by name."""


def _sums_of(sums: _Sums, name: object) -> list[int]:
    """Return the sums of a name; beyond the maximum number of names, the sums of ``OTHERS``."""
    if not isinstance(name, str) or (name not in sums and len(sums) >= MOST_NAMES):
        name = OTHERS
    return sums.setdefault(name, [0, 0, 0, 0])


def _shown(name: str) -> str:
    return name[:_LONGEST_NAME].encode("utf-8", "replace").decode()


def _add(sums: _Sums, name: str, numbers: list[int]) -> None:
    total = _sums_of(sums, name)
    total[:] = [sum(pair) for pair in zip(total, numbers, strict=True)]


class SpanSums:
    """Sums spans by name and time slice, in bounded memory, from any thread and task.

    Attributes:
        counts: The last value of each counter.
        ended: The trajectories that have ended.
    """

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        self.ended = EndedTrajectories(maxlen=MOST_ENDED)
        # By number of the time slice: end of the first span that was added, and the sums.
        self._slices: dict[int, tuple[int, _Sums]] = {}
        self._slice_ns = _SHORTEST_SLICE_NS
        # Reentrant: the garbage collector may end a span under the lock.
        self._lock = threading.RLock()

    def count(self, name: str, value: float) -> None:
        """Keep a counter's last value; names after the first :data:`MOST_NAMES` are dropped."""
        name = _shown(name)
        if name in self.counts or len(self.counts) < MOST_NAMES:
            self.counts[name] = float(value)

    def add(self, name: str, begin_ns: int, end_ns: int, failed: bool, tokens: int = 0) -> None:
        """Add a span that has ended. Any object is accepted as its name, and nothing raises."""
        with self._lock:
            known = self._slices.get(end_ns // self._slice_ns)
            if known is None:
                while len(self._slices) >= MOST_SLICES:
                    self._join()
                known = self._slices.setdefault(end_ns // self._slice_ns, (end_ns, {}))
            sums = known[1]
            try:
                numbers = sums[name]
            except (KeyError, TypeError):
                numbers = _sums_of(sums, name)
            numbers[0] += 1
            numbers[1] += max(0, end_ns - begin_ns)
            numbers[2] += failed
            numbers[3] += tokens

    def end(self, part: Begun, end_ns: int) -> None:
        """Add an ended part of a weight update at the time of its middle, as its end may be that of
        the step.
        """
        half_ns = (end_ns - part.begin_ns) // 2
        failed = getattr(part, "failed", False)
        self.add(f"{WEIGHT_SYNC}/{part.name}", part.begin_ns - half_ns, end_ns - half_ns, failed)

    def last_ns(self) -> int:
        """Return the end of the last time slice with more than garbage collections, at most now;
        0 without one.
        """
        ended = [number for number, (_, sums) in [*self._slices.items()] if sums.keys() != {GC}]
        return min(clock.now_ns(), (max(ended, default=-1) + 1) * self._slice_ns)

    def of_steps(self, steps: Sequence[Period], ahead_ns: int) -> list[tuple[SpanTotal, ...]]:
        """Return the sums of the spans that ended in each step; then drop all up to the last step's
        end.

        A time slice counts where its first span ended: many end just before their step does.

        Args:
            steps: Begin and end of each step, in order, on the clock of the loop's process.
            ahead_ns: Clock offset: this process's clock minus the loop's.
        """
        of_steps: list[_Sums] = [{} for _ in steps]
        with self._lock:
            slices, self._slices = self._slices, {}  # a garbage collection may add itself meanwhile
            for number, (first_ns, sums) in slices.items():
                ended_ns = first_ns - ahead_ns
                if not steps or ended_ns > steps[-1][1]:
                    self._slices[number] = first_ns, sums
                    continue
                at = bisect_right(steps, ended_ns, key=_begin_of) - 1
                if at >= 0 and ended_ns <= steps[at][1]:
                    for name, numbers in sums.items():
                        _add(of_steps[at], _shown(name), numbers)
            if not self._slices:
                self._slice_ns = _SHORTEST_SLICE_NS
        return [
            tuple(SpanTotal(name, *numbers) for name, numbers in sums.items()) for sums in of_steps
        ]

    def _join(self) -> None:
        """Join each two neighbouring time slices into one of twice the length."""
        self._slice_ns *= 2
        slices, self._slices = self._slices, {}
        for number, (first_ns, sums) in slices.items():
            joined = self._slices.setdefault(number // 2, (first_ns, {}))[1]
            for name, numbers in sums.items():
                _add(joined, name, numbers)


class Busy:
    """A stage that is open while at least one request, or one trajectory, is in progress.

    Wrap each request in ``with busy:``, in any thread or task.

    Args:
        sums: The sums that record the stage.
        name: Name of the stage.

    Attributes:
        sums: The sums.
        name: Name of the stage.
        running: Number of the requests in progress.
    """

    def __init__(self, sums: StageSums, name: str) -> None:
        self.sums = sums
        self.name = name
        self.running = 0
        self._stage: Begun | None = None
        # Reentrant: the garbage collector may end a request under the lock.
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        with self._lock:
            self.running += 1
            if self._stage is None:
                self._stage = Begun(self.name, clock.now_ns())
                self.sums.open[id(self._stage)] = self._stage

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self.running -= 1
            if not self.running and self._stage is not None:
                self.sums.end(self._stage, clock.now_ns())
                self._stage = None


_begin_of = itemgetter(0)
