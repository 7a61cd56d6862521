"""Why a run did not end well: who went first, in which step, stage and call, and its class.

The evidence is what processes had on disk before they died (``processes/``), and the log of the
watch. A failure of another process explains a connection that closed, never the other way round.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC
from operator import attrgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.host_use import KINDS, oom_kills
from verl_profiling.files.process_record import RECORDS, End, Gone, ProcessRecord, read_records
from verl_profiling.files.run_files import known_run
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import read_watch_log
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import MAX_NS, RunInfo
from verl_profiling.units import byte_size

LOOP = "controller"
_FULL = (ENOSPC, EDQUOT)
_ENGINE_GONE = {"EngineDeadError", "EngineGenerateError"}
_DEVICE_FULL = "out of device memory"
_RAY_KILLED = {"OutOfMemoryError", "NodeDiedError"}
_FOLLOWS = re.compile(
    r"Connection (?:closed|reset)|Broken ?[Pp]ipe|^EOFError|remote process exited|ActorDiedError"
    r"|ActorUnavailableError|WorkerCrashedError|WorkerLostError|ConnectionRefused|Socket closed"
)
"""Errors that say that another process is gone, and not which one went first."""

_OUT_OF_MEMORY = re.compile(r"(?:CUDA|HIP|NPU)(?: [Ee]rror)?:? ?out of memory")
"""Errors of torch, of its Ascend extension, and of vLLM's allocator, which maps memory itself."""

_LATE = re.compile(r"[Tt]imed out|[Tt]imeout")
_IN_A_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|gloo|NCCL|collective|recv operation"
    r"|send operation",
    re.IGNORECASE,
)


class Death(msgspec.Struct, frozen=True):
    """Who went first.

    Attributes:
        lane: Its lane; empty if unknown.
        kind: ``out of device memory``, ``killed for memory``, ``exception``, ``collective``,
            ``engine gone``, ``disk full``, ``signal`` or ``not known``.
        step: The step; ``None`` if unknown.
        stage: The stage; empty for none.
        code: The line of user code.
        what: The last line of the traceback, or the evidence.
        seen: How long before the death step and stage were read, in words; empty if they are those
            of the death itself.
    """

    lane: str = ""
    kind: str = "not known"
    step: int | None = None
    stage: str = ""
    code: str = ""
    what: str = ""
    seen: str = ""

    def sentence(self) -> str:
        """Return it as a sentence."""
        if not self.lane:
            return f"who went first is not known: {self.what}"
        why = f"{self.kind}: {self.what}"
        first = f"{self.lane} went first"
        if self.seen:
            step = "" if self.step is None else f" of step {self.step}"
            return f"{first}, last seen in {self.stage or 'no stage'}{step}, {self.seen}: {why}"
        if self.step is not None:
            first += f" in step {self.step}"
        first += f", {self.stage or 'in no stage'}"
        if self.code:
            first += f", at {self.code}"
        return f"{first}: {why}"


def death_in(run: Path, info: RunInfo | None = None) -> Death | None:
    """Return who went first in a run that did not end well; ``None`` for any other run.

    Args:
        run: Folder of the run.
        info: Its ``run.json``.
    """
    info = info or known_run(run)
    if info is None or not info.is_watched or not info.over:
        return None
    records = [*read_records(run / RECORDS)]
    logged: Sequence[StepSummary] = ()
    with suppress(TraceFormatError):
        logged = read_watch_log(run)
    # A step that raised may be logged as one that ended.
    since_ns = max(map(attrgetter("begin_ns"), logged), default=info.begin_ns)
    story = _Story(records, logged, since_ns, info.end_ns or MAX_NS)
    if info.end_ns is None or story.is_fatal:
        return story.death()
    return None


class _Story:
    """The evidence on the end of one run.

    Args:
        records: The records of all processes.
        logged: Lines of the watch's log.
        since_ns: Begin of the last step; a failure before it was handled.
        until_ns: End of training; a process may fail after it, e.g. in the next run.

    Attributes:
        is_fatal: Whether an exception left the loop.
    """

    def __init__(
        self,
        records: Sequence[ProcessRecord],
        logged: Sequence[StepSummary],
        since_ns: int,
        until_ns: int,
    ) -> None:
        self._records = [_without_handled(record, since_ns) for record in records]
        self._logged = logged
        self._failed: list[ProcessRecord] = []
        self._step: int | None = None
        gone: list[Gone] = []
        for record in self._records:
            if _end(record).error and _end(record).at_ns <= until_ns:
                self._failed.append(record)
            if record.step is not None:
                self._step = max(record.step, self._step or 0)
            gone += [dead for dead in record.gone if since_ns < dead.at_ns <= until_ns]
        self._failed.sort(key=lambda record: _end(record).at_ns)
        self._gone = _first_of(gone, self._records)
        ends = list(map(_end, self._failed))
        self._stage = next(filter(None, map(attrgetter("stage"), ends)), "")
        self.is_fatal = any(map(attrgetter("is_fatal"), ends))

    def death(self) -> Death:
        """Return who went first; the first rule that fits holds."""
        gone = self._gone
        # An exception that leaves the loop is written down: it had handled all before.
        was_killed = not self.is_fatal and any(r.end is None for r in self._loops())
        if not self._failed or was_killed:
            death = self._silent() if gone is None else self._killed(gone)
            before = [f"; before, {r.lane} had raised {_end(r).error}" for r in self._failed[:1]]
            return replace(death, what="".join([death.what, *before]))
        first = self._failed[0]
        end = _end(first)
        # The survivor of a connection may raise a moment before it sees that the other one is dead.
        if gone is not None and (gone.at_ns < end.at_ns or _FOLLOWS.search(end.error)):
            return self._killed(gone)
        return self._late() or self._raised(first, end)

    def _raised(self, first: ProcessRecord, end: End) -> Death:
        """Return the death by the first exception."""
        who = first
        named = [record for record in self._records if record.process.pid == end.pid]
        if len(named) == 1:
            [who] = named
        if _FOLLOWS.search(end.error) and _ENGINE_GONE.isdisjoint(end.types):
            if len(named) == 1 and who.end is None:
                return self._killed(Gone(end.at_ns, who.lane, end.pid))
            what = f"{first.lane} saw {end.error}, and no other process left anything"
            return Death(step=self._step, what=what)
        what = end.error
        kind = _kind_of(end)
        if kind == _DEVICE_FULL:
            what += self._device_of(who)
        elif not _RAY_KILLED.isdisjoint(end.types):
            what += f"; {self._holder()}"
        return Death(who.lane, kind, self._step, self._stage, end.code, what)

    def _killed(self, gone: Gone) -> Death:
        """Return the death of a process that left nothing."""
        key = gone.lane, gone.pid
        record = next((dead for dead in self._records if _key(dead) == key), None)
        if record is None:
            return Death(step=self._step, what=f"{gone.lane} died, and left no readable record")
        kind, what = "signal", f"killed by signal {gone.signal}"
        if record.role == ROLLOUT_ROLE:
            kind = "engine gone"
        if gone.oom_kills and gone.signal in (0, signal.SIGKILL):
            kind, what = "killed for memory", self._holder()
        elif not gone.signal:
            what = "nobody saw which one, or it crashed in native code; it wrote nothing at its end"
        else:
            with suppress(ValueError):  # not every real-time signal has a name
                what = f"killed by {signal.Signals(gone.signal).name}"
        seen = "how long before is not known"
        if gone.at_ns and record.at_ns:
            seen = f"{max(0, gone.at_ns - record.at_ns) / 1e9:.1f} s before"
        step = self._step_of(record)
        return Death(record.lane, kind, step, record.stage, what=what, seen=seen)

    def _step_of(self, record: ProcessRecord) -> int | None:
        """Return the step in which a process was at its last reading; ``None`` if unknown."""
        if record.step is not None:
            return record.step
        last = max(self._logged, key=attrgetter("begin_ns"), default=None)
        for line in self._logged:
            is_open = line is last and not line.end_ns  # it hung
            if line.begin_ns <= record.at_ns and (is_open or record.at_ns < line.end_ns):
                return line.step
        # Later steps may be over, and not yet in the log.
        if last is None or (record.at_ns >= last.end_ns and self._step == last.step + 1):
            return self._step
        return None

    def _silent(self) -> Death:
        """Return the death of a run in which nobody raised, and nobody saw another one die."""
        for last in self._logged[-1:]:
            hang = last.hang
            if hang is not None and not last.end_ns:
                what = f"{hang.reason}, when it was ended"
                kind = "not known"
                if "has not entered" in hang.reason:
                    kind = "collective"
                return Death(hang.lane, kind, last.step, hang.stage, what=what)
        silent = [record for record in self._records if record.end is None]
        # A controller would have raised if a worker had died first; a rank may be ended before it.
        silent = self._loops() or silent
        if len(silent) != 1:
            names = ", ".join(map(attrgetter("lane"), silent)) or "every process"
            return Death(step=self._step, what=f"no process raised, and {names} left no end")
        [record] = silent
        kills = 0
        if record.process.clock_domain == clock.domain():
            kills = max(0, oom_kills() - record.oom_kills)
        return self._killed(Gone(0, record.lane, record.process.pid, oom_kills=kills))

    def _loops(self) -> list[ProcessRecord]:
        """Return the record of the loop, unless its ranks are several processes."""
        loops = [record for record in self._records if record.step is not None]
        return loops if len(loops) == 1 and loops[0].lane == LOOP else []

    def _late(self) -> Death | None:
        """Return the rank that had not entered a collective, while the others waited in vain."""
        end = _end(self._failed[0])
        if not (_LATE.search(end.error) and _IN_A_COLLECTIVE.search(end.error + end.code)):
            return None
        role = self._failed[0].role
        waited = {record.lane for record in self._failed}
        missing = [r for r in self._records if r.role == role and r.lane not in waited]
        if len(missing) != 1:
            return Death(step=self._step, what=f"{', '.join(waited)} waited in vain: {end.error}")
        [late] = missing
        what = f"it had not entered the collective of the others: {end.error}"
        return Death(late.lane, "collective", self._step, late.stage, what=what)

    def _device_of(self, failed: ProcessRecord) -> str:
        """Return a clause on who held the memory of a process's device; empty if unknown."""
        use = failed.device
        if use is None or not use.total_bytes:
            return ""
        holders = []
        others = use.total_bytes - use.free_bytes
        for record in self._records:
            device = record.device
            if device is None or device.device != use.device:
                continue
            others -= device.reserved_bytes
            parts = [f"{name} {byte_size(size)}" for name, size in device.parts.items() if size]
            parts.append(f"cached {byte_size(device.reserved_bytes - device.allocated_bytes)}")
            held = f"{record.lane} held {byte_size(device.reserved_bytes)} ({', '.join(parts)})"
            age_s = abs(use.at_ns - device.at_ns) / 1e9
            holders.append(held if record is failed else f"{held} {age_s:.1f} s from then")
        if others >= 0:
            holders.append(f"others {byte_size(others)}")
        free = f"{byte_size(use.free_bytes)} of {byte_size(use.total_bytes)} was free"
        return f"; {free}; {', '.join(holders)}"

    def _holder(self) -> str:
        """Return a clause on who held the memory."""
        for line in reversed(self._logged):
            if line.noticed is not None and line.noticed.memory:
                return line.noticed.reason.partition(": ")[2]
        sizes = {}
        for record in self._records:
            for kind in KINDS:
                sizes[f"{kind} memory of {record.lane}"] = getattr(record.use, kind)
            if record.machine is not None:
                sizes[f"shared memory of {record.machine.host}"] = record.machine.shared_bytes
        most = max(sizes, key=sizes.__getitem__)
        return f"{most} was the largest at the last reading, {byte_size(sizes[most])}"


def _first_of(gone: Sequence[Gone], records: Sequence[ProcessRecord]) -> Gone | None:
    """Return the first process that died without an end; of its signal, its parent knows most."""
    process_of = attrgetter("lane", "pid")
    ended = {_key(record) for record in records if record.end is not None}
    silent = [dead for dead in gone if process_of(dead) not in ended]
    if not silent:
        return None
    first = process_of(min(silent, key=attrgetter("at_ns")))
    alike = [dead for dead in silent if process_of(dead) == first]
    return max(alike, key=attrgetter("signal", "oom_kills"))


def _without_handled(record: ProcessRecord, since_ns: int) -> ProcessRecord:
    """Return the record of a process without a failure before a time."""
    end = record.end
    if end is None or not end.error or end.at_ns > since_ns:
        return record
    return replace(record, end=End(at_ns=end.at_ns) if end.has_left else None)


def _key(record: ProcessRecord) -> tuple[str, int]:
    """Return lane and process id; processes of two containers may have one process id."""
    return record.lane, record.process.pid


def _end(record: ProcessRecord) -> End:
    return record.end or End(at_ns=0)


def _kind_of(end: End) -> str:
    """Return the class of an exception."""
    if _OUT_OF_MEMORY.search(end.error):
        return _DEVICE_FULL
    if end.errno in _FULL or "No space left on device" in end.error:
        return "disk full"
    if not _ENGINE_GONE.isdisjoint(end.types):
        return "engine gone"
    if "MemoryError" in end.types or not _RAY_KILLED.isdisjoint(end.types):
        return "killed for memory"
    if "KeyboardInterrupt" in end.types:
        return "signal"
    return "exception"


class Attempt(msgspec.Struct, frozen=True):
    """One start of a run.

    Attributes:
        folder: Its folder.
        info: Its ``run.json``.
        steps: First and last step in the log of its watch.
        end: How it ended.
    """

    folder: Path
    info: RunInfo
    steps: tuple[int, int] | None
    end: str


def attempts_of(run: Path) -> Iterator[Attempt]:
    """Yield all starts with the name of a run, in order; none for a run that started once."""
    this = known_run(run)
    root = run
    if run.name.startswith("run_") and known_run(run.parent):
        root = run.parent
    starts = {}
    for path in (root, *sorted(root.glob("run_*"), key=lambda path: (len(path.name), path.name))):
        info = known_run(path)
        if this and info and info.run_id == this.run_id:
            starts[path] = info
    if len(starts) < 2:
        return
    for path, info in starts.items():
        steps = None
        with suppress(TraceFormatError):
            numbers = [line.step for line in read_watch_log(path)]
            if numbers:
                steps = (min(numbers), max(numbers))
        death = death_in(path, info)
        end = info.over or "it runs, or its process is on another host"
        if death is not None:
            end = death.sentence()
        yield Attempt(path, info, steps, end)
