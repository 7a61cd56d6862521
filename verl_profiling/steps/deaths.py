"""Why a run did not end well: who went first, in which step, stage and call, and its class.

The evidence is what processes had on disk before they died (``processes/``), and the log of the
watch. A failure of another process explains a connection that closed, never the other way round.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from errno import EDQUOT, ENOSPC
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
from verl_profiling.manifest import RunInfo
from verl_profiling.units import byte_size

LOOP = "controller"
_FULL = (ENOSPC, EDQUOT)
_ENGINE_GONE = {"EngineDeadError", "EngineGenerateError"}
_RAY_KILLED = {"OutOfMemoryError", "NodeDiedError"}
_FOLLOWS = re.compile(
    r"Connection (?:closed|reset)|Broken ?[Pp]ipe|^EOFError|remote process exited|ActorDiedError"
    r"|ActorUnavailableError|WorkerCrashedError|WorkerLostError|ConnectionRefused|Socket closed"
)
"""Errors that say that another process is gone, and not which one went first."""

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
        kind: ``killed for memory``, ``exception``, ``collective``, ``engine gone``, ``disk full``,
            ``signal`` or ``not known``.
        step: The step; ``None`` if unknown.
        stage: The stage; empty for none.
        code: The line of user code.
        what: The last line of the traceback, or the evidence.
    """

    lane: str = ""
    kind: str = "not known"
    step: int | None = None
    stage: str = ""
    code: str = ""
    what: str = ""

    def sentence(self) -> str:
        """Return it as a sentence."""
        if not self.lane:
            return f"who went first is not known: {self.what}"
        where = "" if self.step is None else f" in step {self.step}"
        where += f", {self.stage or 'in no stage'}"
        where += f", at {self.code}" if self.code else ""
        return f"{self.lane} went first{where}: {self.kind}: {self.what}"


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
    since_ns = max((line.begin_ns for line in logged), default=info.begin_ns)
    until_ns = math.inf if info.end_ns is None else info.end_ns
    story = _Story(records, logged, since_ns, until_ns)
    return story.death() if info.end_ns is None or story.is_fatal else None


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
        until_ns: float,
    ) -> None:
        records = [_without_handled(one, since_ns) for one in records]
        self._records = records
        self._logged = logged
        failed = [one for one in records if _end(one).error and _end(one).at_ns <= until_ns]
        self._failed = sorted(failed, key=lambda record: _end(record).at_ns)
        seen = [gone for record in records for gone in record.gone]
        gone = [one for one in seen if since_ns < one.at_ns <= until_ns]
        self._gone = _first_of(gone, records)
        steps = [record.step for record in records if record.step is not None]
        self._step = max(steps, default=None)
        self._stage = next(filter(None, [_end(one).stage for one in self._failed]), "")
        self.is_fatal = any(_end(record).is_fatal for record in failed)

    def death(self) -> Death:
        """Return who went first; the first rule that fits holds."""
        gone = self._gone
        if not self._failed:
            return self._silent() if gone is None else self._killed(gone)
        first = self._failed[0]
        end = _end(first)
        # The survivor of a connection may raise a moment before it sees that the other one is dead.
        if gone is not None and (gone.at_ns < end.at_ns or _FOLLOWS.search(end.error)):
            return self._killed(gone)
        if (late := self._late()) is not None:
            return late
        known = [record for record in self._records if record.process.pid == end.pid]
        if _FOLLOWS.search(end.error) and not _ENGINE_GONE & {*end.types}:
            if len(known) == 1 and known[0].end is None:
                return self._killed(Gone(end.at_ns, known[0].lane, end.pid))
            what = f"{first.lane} saw {end.error}, and no other process left anything"
            return Death(step=self._step, what=what)
        who = known[0] if len(known) == 1 else first
        return Death(
            who.lane, _kind_of(end), self._step, self._stage, end.code, self._with_holder(end)
        )

    def _killed(self, gone: Gone) -> Death:
        """Return the death of a process that left nothing."""
        record = next(one for one in self._records if _key(one) == (gone.lane, gone.pid))
        kind, what = "signal", f"killed by signal {gone.signal}"
        if gone.oom_kills and gone.signal in (0, signal.SIGKILL):
            kind, what = "killed for memory", self._holder()
        elif record.role == ROLLOUT_ROLE:
            kind = "engine gone"
        if not gone.signal and kind != "killed for memory":
            what = "it left nothing: a signal, or a crash in native code"
        elif gone.signal and kind != "killed for memory":
            with suppress(ValueError):  # not every real-time signal has a name
                what = f"killed by {signal.Signals(gone.signal).name}"
        return Death(record.lane, kind, self._step, record.stage or self._stage, what=what)

    def _silent(self) -> Death:
        """Return the death of a run in which nobody raised, and nobody saw another one die."""
        last = self._logged[-1] if self._logged else None
        if last is not None and last.hang is not None and not last.end_ns:
            hang = last.hang
            kind = "collective" if "has not entered" in hang.reason else "not known"
            what = f"{hang.reason}, when it was ended"
            return Death(hang.lane, kind, last.step, hang.stage, what=what)
        loops = [record for record in self._records if record.step is not None]
        silent = [record for record in self._records if record.end is None]
        # A controller would have raised if a worker had died first; a rank may be ended before it.
        if len(loops) == 1 and loops[0].lane == LOOP:
            silent = loops
        if len(silent) != 1:
            names = ", ".join(record.lane for record in silent) or "every process"
            return Death(step=self._step, what=f"no process raised, and {names} left no end")
        [record] = silent
        kills = 0
        if record.process.clock_domain == clock.domain():
            kills = max(0, oom_kills() - record.oom_kills)
        return self._killed(Gone(0, record.lane, record.process.pid, oom_kills=kills))

    def _late(self) -> Death | None:
        """Return the rank that had not entered a collective, while the others waited in vain."""
        end = _end(self._failed[0])
        if not (_LATE.search(end.error) and _IN_A_COLLECTIVE.search(end.error + end.code)):
            return None
        role = self._failed[0].role
        waited = {record.lane for record in self._failed}
        missing = [one for one in self._records if one.role == role and one.lane not in waited]
        if len(missing) != 1:
            return Death(step=self._step, what=f"{', '.join(waited)} waited in vain: {end.error}")
        [late] = missing
        what = f"it had not entered the collective of the others: {end.error}"
        return Death(late.lane, "collective", self._step, late.stage or self._stage, what=what)

    def _with_holder(self, end: End) -> str:
        return f"{end.error}; {self._holder()}" if _RAY_KILLED & {*end.types} else end.error

    def _holder(self) -> str:
        """Return a clause on who held the memory."""
        for line in reversed(self._logged):
            if line.noticed is not None and line.noticed.sign == "memory":
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
    ended = {_key(record) for record in records if record.end is not None}
    silent = [one for one in gone if (one.lane, one.pid) not in ended]
    first = min(silent, key=lambda one: one.at_ns, default=None)
    alike = [one for one in silent if first and (one.lane, one.pid) == (first.lane, first.pid)]
    return max(alike, key=lambda one: (one.signal, one.oom_kills), default=None)


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
    types = {*end.types}
    if end.errno in _FULL or "No space left on device" in end.error:
        return "disk full"
    if types & _ENGINE_GONE:
        return "engine gone"
    if types & _RAY_KILLED or "MemoryError" in types:
        return "killed for memory"
    return "signal" if "KeyboardInterrupt" in types else "exception"


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
    own = known_run(run)
    root = run.parent if run.name.startswith("run_") and known_run(run.parent) else run
    folders = [root, *sorted(root.glob("run_*"), key=lambda path: (len(path.name), path.name))]
    starts = [(path, known_run(path)) for path in folders]
    alike = [(path, info) for path, info in starts if own and info and info.run_id == own.run_id]
    for path, info in alike[: len(alike) * (len(alike) > 1)]:
        numbers: list[int] = []
        with suppress(TraceFormatError):
            numbers = [line.step for line in read_watch_log(path)]
        death = death_in(path, info)
        end = info.over or "it runs, or its process is on another host"
        if death is not None:
            end = death.sentence()
        steps = (min(numbers), max(numbers)) if numbers else None
        yield Attempt(path, info, steps, end)
