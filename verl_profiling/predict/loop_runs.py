"""The runs of a step, and the runs that the loop waits for.

A run is one stage, one trajectory or one request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.manifest import MOST_NESTED, POLLING, WAIT, StageSpan
from verl_profiling.predict.segments import NOTHING, OWN, Segment
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import grouped
from verl_profiling.steps.lanes import Step
from verl_profiling.steps.requests import VALIDATE
from verl_profiling.steps.trajectory_columns import BEFORE
from verl_profiling.steps.trajectory_spans import stages_by_row

LOOP = "controller"

_SAME_NAME = "a stage of the loop waits for the stages of workers with its name"
_INSIDE = "a stage of the loop waits for the stages of workers inside it"
_OUTSIDE = "outside stages, the loop waits for workers"
_STEADY = (
    "a rollout that began in the last step began as late in it as the next one does in this step"
)
_AWAITED = "a stage wait:NAME waits for the stage NAME that ends in it"
_ROLLOUT = "a rollout waits for the trajectories and requests that end in it"


@dataclass(slots=True, eq=False)
class Run:
    """A stage, a trajectory or a request.

    Attributes:
        who: Lane, worker, or the loop.
        role: Role of the worker.
        name: The stage; empty for the step, a trajectory and a request.
        begin_ns: Begin.
        end_ns: End.
        row: Row of the timeline, on which runs follow each other; ``None`` without one.
        pieces: Segments of a trajectory or request, such as its calls and waits.
        chain: Number of the chain that the trajectory is, instead of ``pieces``; else -1.
        before: Its segments before the step, if a trajectory is in a call when the step begins.
        trajectory: ``GROUP.SAMPLE`` of the trajectory, else its number.
        around: Stage that waits for the run, if the run begins before that stage.
        inner: Runs inside this run, which it starts.
        waits: Runs that this run waits for.
        called: Whether a worker has a stage of the same name inside the run.
        is_cut: Whether it began before the step.
        entry: Index of its first segment in the graph.
        exit: Index of its last segment in the graph.
    """

    who: str
    role: str
    name: str
    begin_ns: int
    end_ns: int
    row: object = None
    pieces: list[Segment] = field(default_factory=list)
    chain: int = NOTHING
    before: list[Segment] = field(default_factory=list)
    trajectory: str = ""
    around: tuple[str, ...] = ()
    inner: list[Run] = field(default_factory=list)
    waits: list[Run] = field(default_factory=list)
    called: bool = False
    is_cut: bool = False
    entry: int = -1
    exit: int = -1

    @property
    def is_rollout(self) -> bool:
        """Whether the run is a trajectory or a request, and no stage."""
        return bool(self.pieces) or self.chain != NOTHING

    @property
    def has_own_end(self) -> bool:
        """Whether a rollout's own end is known, and not only that of its batch."""
        requests = [piece.request for piece in self.pieces if piece.request is not None]
        return bool(self.trajectory) or not any(one.ends_with_batch for one in requests)

    def ends_in(self, other: Run) -> bool:
        """Return whether the run ends inside another run."""
        return other.begin_ns < self.end_ns <= other.end_ns

    def clip(self, begin_ns: int, end_ns: int) -> None:
        """Clip the run, and everything inside it, to the time from ``begin_ns`` to ``end_ns``."""
        if begin_ns <= self.begin_ns and self.end_ns <= end_ns:
            return
        parts: list[Run | Segment] = [self, *self.pieces]
        for part in parts:
            part.begin_ns = min(max(part.begin_ns, begin_ns), end_ns)
            part.end_ns = min(max(part.end_ns, begin_ns), end_ns)
        for run in self.inner:
            run.clip(begin_ns, end_ns)


class Early(NamedTuple):
    """Work that began in the step before, such as a rollout one step ahead of the training.

    Similar work begins in this step and goes on in the next one.

    Attributes:
        works: The runs that are this work.
        mark: Instant of the loop at which the similar work begins.
        stage: The stage that waits for the work.
    """

    works: list[Run]
    mark: Run
    stage: Run


class LoopRuns:
    """The stages of the loop, and the runs that they call and wait for.

    Args:
        step: The step.
        graph: The graph, which gets sentences on what is assumed or unknown.

    Attributes:
        root: The step, as a run of the loop's process.
        stages: The stages of the loop's process.
        ranks: The ranks of an SPMD program, else the loop.
        loose: Runs that no stage calls.
    """

    def __init__(self, step: Step, graph: Graph) -> None:
        manifest = step.manifest
        self._workers = [
            worker for worker in step.workers if manifest and manifest.runs_the_loop(worker)
        ]
        who, role = LOOP, ""
        if self._workers:
            who, role = self._workers[0].name, self._workers[0].identity.role
        self.root = Run(who, role, "", step.begin_ns, step.end_ns)
        self.stages = list(_stages(step.stages, self.root))
        self.ranks = [self.root]
        self.loose = list[Run]()
        self._by_name = grouped(self.stages, lambda stage: stage.name)
        self._graph = graph
        self._error_ns = step.clock_error_ns
        self._wait_by_name()
        self._beside = list(filter(self._goes_on_beside, self.root.waits))
        for run in self._beside:
            self.root.waits.remove(run)

    def _goes_on_beside(self, run: Run) -> bool:
        """Return whether a stage runs in the background: it is open when the step ends, and
        overlaps the end of another stage.
        """
        end_ns = self.root.end_ns
        return run.end_ns >= end_ns and any(
            other.row != run.row and run.begin_ns < other.end_ns < end_ns
            for other in self.root.waits
        )

    def _wait_by_name(self) -> None:
        """Let each stage ``wait:NAME`` wait for the stages ``NAME`` that end in it."""
        for stage in self.stages:
            named = self._by_name.get(stage.name.removeprefix(WAIT), [])
            awaited = [run for run in named if run.name != stage.name and run.ends_in(stage)]
            if awaited:
                stage.waits += awaited
                self._graph.assumed[_AWAITED] += 1

    def runs_of_workers(self, step: Step) -> dict[str, list[Run]]:
        """Return the outermost stages by worker; ranks of an SPMD program join ``loose`` instead,
        each as one run with its stages.
        """
        of_workers = dict[str, list[Run]]()
        for worker in step.workers:
            if worker in self._workers:
                continue
            whole = Run(worker.name, worker.identity.role, "", step.begin_ns, step.end_ns)
            list(_stages(worker.stages, whole))
            if self._workers and whole.role == self.root.role:
                whole.end_ns = max((run.end_ns for run in whole.inner), default=step.begin_ns)
                self.loose.append(whole)
                self.ranks.append(whole)
            else:
                of_workers.setdefault(worker.name, []).extend(whole.inner)
        if step.manifest is None:  # plain traces have no stages: each lane is one run
            for lane in step.lanes:
                if len(lane.busy):
                    times = int(lane.busy[0, 0]), int(lane.busy[-1, 1])
                    of_workers[lane.name] = [Run(lane.name, lane.source.role, "", *times)]
        return of_workers

    def call(self, runs: Iterable[Run]) -> None:
        """Let stages of the loop call the stages of workers, and wait for them.

        A worker's stage is called by the loop's stage of its name, else by the one around it.
        """
        others = list[Run]()
        for run in runs:
            same = self._homes(run, self._by_name.get(run.name, []))
            if same:
                self._join(run, same, _SAME_NAME).called = True
            else:
                others.append(run)
        for run in others:
            inside = self._around(run)
            if inside or not self._is_beside(run):
                self._join(run, inside, _INSIDE if inside else _OUTSIDE)
            else:
                self.loose.append(run)

    def roll_out(self, of_workers: Mapping[str, Sequence[Run]], runs: Iterable[Run]) -> None:
        """Let stages, of the same worker else of the loop, wait for trajectories and requests."""
        rollouts = [*self._by_name.get(ROLLOUT, ()), *self._by_name.get(VALIDATE, ())]
        waiting = self._for_rollouts_without_a_stage()
        for run in runs:
            homes = [stage for stage in of_workers.get(run.who, ()) if self._holds(stage, run)]
            homes = homes or list(filter(run.ends_in, rollouts)) or self._around(run)
            if run.end_ns >= self.root.end_ns or (not homes and self._is_beside(run)):
                self.loose.append(run)
                continue
            home = self._join(run, homes, _ROLLOUT)
            for stage in waiting:
                if run.ends_in(stage) and stage is not home:
                    stage.waits.append(run)

    def _for_rollouts_without_a_stage(self) -> list[Run]:
        """Return the stages ``wait:rollout`` in which no stage ``rollout`` ends."""
        waits = self._by_name.get(WAIT + ROLLOUT, ())
        return [stage for stage in waits if all(run.name != ROLLOUT for run in stage.waits)]

    def _holds(self, stage: Run, run: Run) -> bool:
        """Return whether a run lies inside a stage, up to the error of the clocks."""
        begin_ns, end_ns = run.begin_ns + self._error_ns, run.end_ns - self._error_ns
        return stage.begin_ns <= begin_ns and end_ns <= stage.end_ns

    def _homes(self, run: Run, stages: Sequence[Run]) -> list[Run]:
        """Return the stages that a run lies in, else the stages that it ends in."""
        around = [stage for stage in stages if self._holds(stage, run)]
        return around or list(filter(run.ends_in, stages))

    def _around(self, run: Run) -> list[Run]:
        """Return the loop's stages around a run that call no worker's stage of their own name."""
        return [stage for stage in self.stages if self._holds(stage, run) and not stage.called]

    def _is_beside(self, run: Run) -> bool:
        return any(
            stage.begin_ns < run.end_ns and run.begin_ns < stage.end_ns for stage in self.stages
        )

    def _join(self, run: Run, homes: Sequence[Run], rule: str) -> Run:
        """Let the shortest of some stages, else the step, wait for a run; return that stage.
        If the run lies inside that stage, it also starts there.
        """
        home = min(homes, key=lambda stage: stage.end_ns - stage.begin_ns, default=self.root)
        self._graph.assumed[rule] += 1
        home.waits.append(run)
        if self._holds(home, run):
            run.clip(home.begin_ns, home.end_ns)
            home.inner.append(run)
        else:
            run.around = (home.name,)
            self.loose.append(run)
        return home

    def carried(self, later: Sequence[int]) -> list[Early]:
        """Return the work that began in the step before.

        Args:
            later: Begins (ns) of work that goes on after the step.
        """
        carried = list(self._ended(later)) or list(self._going_on(later))
        if not carried:
            self._graph.paced_by_rollout = self._waits_for_unrecorded()
        for early in carried:
            self._graph.assumed[_STEADY] += 1
            # Other works are recorded runs, which are in the graph already.
            self.loose += [early.mark, *(work for work in early.works if work.who == ROLLOUT)]
        return carried

    def _ended(self, later: Sequence[int]) -> Iterator[Early]:
        """Yield the work from before the step for which ``rollout`` or ``wait:rollout`` waits."""
        waiting = self._for_rollouts_without_a_stage()
        rollouts = [run for run in self._by_name.get(ROLLOUT, ()) if run not in self._beside]
        for stage in (*rollouts, *waiting):
            works = list(self._works_before_step(stage))
            if not works and (stage.waits or stage in waiting):
                continue
            # the loop marks a rollout in the background also if no worker or trajectory is recorded
            begins = later or [run.begin_ns for run in self._beside if run.name == ROLLOUT]
            next_ns = min((ns for ns in begins if ns >= stage.end_ns), default=self.root.end_ns)
            if next_ns == self.root.end_ns:
                awaited = "work that began before the step" if works else "nothing recorded"
                self._graph.unknown.append(
                    f"{stage.name} waits for {awaited}, so a change is not applied to all that it "
                    "waits for"
                )
                continue
            if not works:
                works = [_before(self.root, stage.end_ns)]
                stage.waits += works
            yield Early(works, _mark(self.root, next_ns), stage)

    def _waits_for_unrecorded(self) -> bool:
        """Return whether a rollout goes on in the background, or the loop waits for one of which
        nothing ends in the wait.
        """
        if any(run.name == ROLLOUT for run in self._beside):
            return True
        return any(
            not any(run.is_rollout or run.who != self.root.who for run in stage.waits)
            for stage in self._for_rollouts_without_a_stage()
        )

    def _works_before_step(self, stage: Run) -> Iterator[Run]:
        """Yield the innermost runs of workers that a stage waits for and that began before the
        step.
        """
        for run in stage.waits:
            if run.begin_ns <= self.root.begin_ns and run.who != self.root.who:
                yield from list(self._works_before_step(run)) or [run]

    def _going_on(self, later: Sequence[int]) -> Iterator[Early]:
        """Yield work from before the step that is like a rollout which goes on after the step."""
        root, waits = self.root, self._by_name.get(WAIT + ROLLOUT, ())
        for stage in self._beside:
            if stage.name != ROLLOUT:
                continue
            waiting = [run for run in waits if run.end_ns <= stage.begin_ns]
            if waiting and stage.waits and not later:
                early_ns = root.end_ns - max(run.end_ns for run in stage.waits)
                work = _before(root, root.begin_ns - early_ns)
                yield Early([work], _mark(root, stage.begin_ns), waiting[-1])
            else:
                sentence = "rollout goes on after the step, so a change is not applied to all of it"
                self._graph.unknown.append(sentence)


def _before(root: Run, end_ns: int) -> Run:
    """Return work of which only its end in the step is known."""
    pieces = [Segment(BEFORE, root.begin_ns, end_ns)]
    return Run(ROLLOUT, "", "", root.begin_ns, end_ns, pieces=pieces, around=(ROLLOUT,))


def _mark(root: Run, ns: int) -> Run:
    """Return an instant of the loop, as a run of no length."""
    return Run(root.who, "", "", ns, ns, pieces=[Segment(OWN, ns, ns)])


def _stages(spans: Iterable[StageSpan], around: Run) -> Iterator[Run]:
    """Yield stages as runs; each is added to the run around it, the outermost to ``around``."""
    opened = defaultdict[int, list[Run]](lambda: [around])
    for span, row in stages_by_row(spans):
        who = around.who
        run = Run(who, around.role, span.name, span.begin_ns, span.end_ns, (who, row))
        run.clip(around.begin_ns, around.end_ns)
        stack = opened[row]
        while stack[-1].end_ns < run.end_ns:
            stack.pop()
        # The time of too deeply nested stages counts for the stage around them.
        if run.end_ns > run.begin_ns and len(stack) <= MOST_NESTED:
            stack[-1].inner.append(run)
            stack[-1].waits.append(run)
            stack.append(run)
            yield run


def polled(stages: Iterable[Run]) -> Iterator[tuple[Run, int, int]]:
    """Replace the sleeps between a stage's polls by one wait, for the poll after the last of the
    runs that the stage waits for.

    Yields:
        The wait for this poll, the begin of the first period (ns), and the period (ns).
    """
    for stage in stages:
        sleeps = [run for run in stage.inner if run.name == POLLING]
        if sleeps:
            yield from _polled(stage, sleeps)


def _look_that_found(stage: Run, row: object, ended_ns: int, end_ns: int) -> int:
    """Return the end of the last sleep; if work ended in the look after it, the end of the work,
    with which the look then begins.
    """
    looks = [run for run in stage.inner if run.row == row and run.begin_ns >= end_ns]
    if looks and looks[0].begin_ns <= ended_ns < looks[0].end_ns:
        looks[0].begin_ns = end_ns = ended_ns + 1
    return end_ns


def _polled(stage: Run, sleeps: Sequence[Run]) -> Iterator[tuple[Run, int, int]]:
    row, begin_ns, end_ns = sleeps[0].row, sleeps[0].begin_ns, sleeps[-1].end_ns
    between = {run for run in stage.inner if run.row == row and begin_ns <= run.begin_ns < end_ns}
    others = [run for run in stage.waits if run not in between and run.begin_ns < end_ns]
    ended_ns = max((run.end_ns for run in others), default=end_ns)
    end_ns = _look_that_found(stage, row, ended_ns, end_ns)
    if ended_ns >= end_ns or not any(run.is_rollout for run in others):
        return
    period_ns = (end_ns - begin_ns) // len(sleeps)
    wait_ns = max(ended_ns, end_ns - period_ns)
    wait = Run(stage.who, stage.role, POLLING, wait_ns, end_ns, row)
    for runs in (stage.inner, stage.waits):
        runs[:] = [run for run in runs if run not in between] + [wait]
    yield wait, end_ns - period_ns * len(sleeps), period_ns
