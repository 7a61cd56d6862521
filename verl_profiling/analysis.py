"""The Python API of the analysis, with the functions of the commands.

>>> from verl_profiling.analysis import open_run, open_step
>>> step = open_step("outputs/run/step_000012")
>>> step.report().findings
>>> step.to_frame("workers").set_index("name")["busy_us"]

Traces are read only when a method needs their events. Neither torch nor a GPU is needed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from verl_profiling.errors import ConfigError, TraceFormatError, choices_hint
from verl_profiling.files.opener import read_small, real_folder
from verl_profiling.files.run_files import known_run, never_came, read_run
from verl_profiling.manifest import Manifest, RunInfo
from verl_profiling.steps.check import CheckResult, check
from verl_profiling.steps.inputs import steps_of, the_run
from verl_profiling.steps.kinds import communicates
from verl_profiling.steps.step import TIMELINE_NAME, Keep, StepInputs, one_by_one
from verl_profiling.steps.trace_content import Limits
from verl_profiling.units import visible

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Unpack

    from verl_profiling.predict.changes import ChangeKeywords
    from verl_profiling.predict.prediction import Prediction
    from verl_profiling.predict.step_graph import Graph
    from verl_profiling.report.model import Report
    from verl_profiling.steps.lanes import Lane
    from verl_profiling.timeline.manifest_events import Slice
    from verl_profiling.timeline.merge import MergeResult

__all__ = [
    "CapturedRun",
    "CapturedStep",
    "FrameName",
    "load_reports",
    "only_step",
    "open_run",
    "open_step",
    "open_steps",
    "saved_report",
]

FrameName: TypeAlias = str
"""Name of a table for :meth:`CapturedStep.to_frame`, e.g. ``workers``: one of
:mod:`verl_profiling.report.tables`, or ``requests``.
"""

Progress = Callable[[object], None]
"""Function that is called with each trace once it is read or merged, e.g. for a progress bar."""


def open_step(
    path: str | os.PathLike[str],
    limits: Limits | None = None,
    communication: Sequence[str] = (),
    ray: str | None = None,
) -> CapturedStep:
    """Open one step.

    Args:
        path: Step folder, trace, or a folder with one step or with the traces of one step.
        limits: Limits on reading each trace, in bytes of content and of memory.
        communication: Regular expressions; kernels whose names match count as communication, too.
        ray: Address of the Ray cluster that reads the traces, e.g. ``auto``; ``None`` for this
            host.

    Raises:
        TraceFormatError: There is nothing to analyse, or the manifest cannot be read.
        ConfigError: There are several steps, or an expression is invalid.
    """
    return only_step(open_run(path, limits, communication, ray).steps(), path)


def only_step(steps: Sequence[CapturedStep], path: str | os.PathLike[str]) -> CapturedStep:
    """Return the step, if only one was found under a path.

    Args:
        steps: The steps that were found.
        path: The path, for the error.

    Raises:
        ConfigError: There are several steps.
    """
    if len(steps) > 1:
        last = steps[-1].inputs
        named = str(last.directory)
        if not last.manifest:
            named = " ".join(str(source.path) for source in last.sources)
        raise ConfigError(
            "path", f"{os.fspath(path)} holds {len(steps)} steps; give one, e.g. {named}"
        )
    return steps[0]


def open_run(
    path: str | os.PathLike[str],
    limits: Limits | None = None,
    communication: Sequence[str] = (),
    ray: str | None = None,
) -> CapturedRun:
    """Open all steps of a run.

    Args:
        path: Run folder, or any path for :func:`open_step`.
        limits: Limits on reading each trace, in bytes of content and of memory.
        communication: Regular expressions; kernels whose names match count as communication, too.
        ray: Address of the Ray cluster that reads the traces, e.g. ``auto``; ``None`` for this
            host.

    Raises:
        TraceFormatError: There is no such file or folder, or it holds several runs.
        ConfigError: An expression is invalid.
    """
    return CapturedRun(the_run(Path(path)), limits or Limits(), tuple(communication), ray)


def open_steps(
    paths: Sequence[str | os.PathLike[str]],
    limits: Limits | None = None,
    communication: Sequence[str] = (),
    ray: str | None = None,
) -> tuple[list[CapturedStep], list[str]]:
    """Open the steps under several paths; plain traces from all paths form one capture.

    Args:
        paths: Paths as for :func:`open_run`.
        limits: Limits on reading each trace, in bytes of content and of memory.
        communication: Regular expressions; kernels whose names match count as communication, too.
        ray: Address of the Ray cluster that reads the traces, e.g. ``auto``; ``None`` for this
            host.

    Returns:
        The readable steps, and one sentence per problem of incomplete or unreadable steps.

    Raises:
        TraceFormatError: There is nothing to analyse, or a path holds several runs.
        ConfigError: An expression is invalid.
    """
    patterns = tuple(communication)
    communicates(patterns)
    runs = list(map(the_run, map(Path, paths)))
    return _opened(runs, limits or Limits(), patterns, ray)


def _opened(
    paths: Sequence[Path], limits: Limits, communication: tuple[str, ...], ray: str | None
) -> tuple[list[CapturedStep], list[str]]:
    steps, damaged = steps_of(paths, ray)
    for step in steps:
        step.limits, step.communication = limits, communication
    begun = [f"{step.directory}: {step.unfinished}" for step in steps if step.unfinished]
    return list(map(CapturedStep, steps)), [*map(str, damaged), *begun]


def load_reports(path: str | os.PathLike[str]) -> list[Report]:
    """Return the report in a saved ``report.json``, or the reports of all steps under a path.

    Raises:
        TraceFormatError: The path is neither a report nor a folder with steps.
    """
    saved = saved_report(path)
    if saved is not None:
        return [saved]
    return [step.report() for capture in open_run(path).steps() for step in capture.by_step()]


def saved_report(path: str | os.PathLike[str]) -> Report | None:
    """Return the report in a saved ``report.json``; ``None`` for any other path.

    Raises:
        TraceFormatError: The file has the name of a report, but another content.
    """
    file = Path(path)
    if not (file.is_file() and file.name.startswith("report") and file.suffix == ".json"):
        return None
    from verl_profiling.report.html import NotebookReport  # merge and check load no report code

    try:
        return msgspec.json.decode(read_small(file.resolve()), type=NotebookReport)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(file, f"not a report: {error}") from error


@dataclass(frozen=True, eq=False)
class CapturedRun:
    """The captured steps of a run.

    Attributes:
        directory: The run's folder.
        limits: Limits on reading each trace, in bytes of content and of memory.
        communication: Regular expressions; kernels whose names match count as communication, too.
        ray: Address of the Ray cluster that reads the traces; ``None`` for this host.
    """

    directory: Path
    limits: Limits
    communication: tuple[str, ...] = ()
    ray: str | None = None

    def __post_init__(self) -> None:
        communicates(self.communication)

    def steps(self) -> list[CapturedStep]:
        """Return the readable steps, in order; warn of each unreadable or incomplete step.

        Raises:
            TraceFormatError: There is nothing to analyse, or no manifest can be read.
        """
        steps, problems = _opened([self.directory], self.limits, self.communication, self.ray)
        for problem in problems:
            warnings.warn(problem, stacklevel=2)
        return steps

    def info(self) -> RunInfo | None:
        """Return the run's settings and versions (``run.json``); ``None`` for plain traces.

        Raises:
            TraceFormatError: ``run.json`` cannot be read.
        """
        return read_run(self.directory) if self.directory.is_dir() else None

    def never_came(self) -> str:
        """Return a sentence on scheduled steps that the loop never began; empty if there are none.

        The sentence is also empty during training, for a killed run, and if ``run.json`` is damaged
        (see
        :meth:`check`).
        """
        return visible(never_came(known_run(self.directory)))

    def check(self) -> CheckResult:
        """Read every artifact to its last byte, and report missing, empty and damaged artifacts.

        Raises:
            TraceFormatError: There is nothing to check.
        """
        return check(self.directory, self.limits, self.ray)


class CapturedStep:
    """A captured step, with methods for its report, timeline and tables.

    Attributes:
        inputs: The files of the step: the manifest, and a source for each trace.
    """

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        self._report: Report | None = None
        self._graph: tuple[Graph, list[str]] | None = None

    @property
    def directory(self) -> Path:
        """The step's folder."""
        return self.inputs.directory

    @property
    def step(self) -> int | None:
        """Number of the step, if known."""
        return self.inputs.step

    @property
    def manifest(self) -> Manifest | None:
        """The expected artifacts with their status, on the controller's clock;
        ``None`` for plain traces.
        """
        return self.inputs.manifest

    @property
    def graph(self) -> Graph | None:
        """The segments of the step's work and their order, with which changes are predicted.

        ``None`` until :meth:`report` (with ``keep_graph``) or :meth:`what_if` keeps the graph.
        """
        return self._graph[0] if self._graph else None

    def by_step(self) -> list[CapturedStep]:
        """Return one object per step of a continuous capture, which records several steps at once;
        any other capture returns ``[self]``.
        """
        parts = one_by_one(self.inputs)
        if len(parts) == 1:
            return [self]
        return list(map(CapturedStep, parts))

    def report(self, on_progress: Progress | None = None, *, keep_graph: bool = False) -> Report:
        """Return the report, which notebooks show as an HTML page; only the first call reads the
        traces.

        Args:
            on_progress: Called with each trace once it is read.
            keep_graph: Whether the first call keeps :attr:`graph`, so that :meth:`what_if` reads no
                trace.

        Raises:
            ConfigError: The capture holds several steps, each with its own report (see
                :meth:`by_step`).
            TraceFormatError: There is neither a manifest nor a readable trace.
        """
        from verl_profiling.report.build import build_report, with_predictions
        from verl_profiling.steps.read import read_step

        if self._report is None:
            self._only_step("report")
            content = read_step(self.inputs, on_progress)
            self._report, graph = with_predictions(build_report(self.inputs, content), content)
            if keep_graph and graph is not None:
                self._graph = graph, content.coverage.missing
        return self._report

    def _only_step(self, method: str) -> None:
        if len(steps := self.by_step()) > 1:
            titles = ", ".join(step.inputs.title for step in steps)
            raise ConfigError(method, f"{self.directory} holds {titles}: use by_step() for each")

    def what_if(
        self, *, on_progress: Progress | None = None, **changes: Unpack[ChangeKeywords]
    ) -> Prediction:
        """Return the step after changes with its critical path; without changes, the recorded step.

        Only the first call reads the traces, and each with changed kernels.

        Args:
            on_progress: Called with each trace once it is read.
            changes: Fields of :class:`~verl_profiling.predict.changes.Changes`, e.g.
                ``scale={"update_actor": 0.5}``; ``None`` for no change.

        Raises:
            ConfigError: The step has no such stage, kernel, tool, rollout or requests, a number is
                wrong, or the capture holds several steps.
            TraceFormatError: There is neither a manifest nor a readable trace.
        """
        from verl_profiling.predict.changes import Changes
        from verl_profiling.predict.graph import graph_of
        from verl_profiling.predict.kernels import with_kernels
        from verl_profiling.predict.prediction import predict
        from verl_profiling.steps.read import read_step

        given = {name: value for name, value in changes.items() if value is not None}
        wanted = Changes(**given)  # type: ignore[arg-type]
        if self._graph is None:
            self._only_step("what_if")
            content = read_step(self.inputs, on_progress)
            self._graph = graph_of(content), content.coverage.missing
        graph, missing = self._graph
        return predict(
            graph, wanted, self.step, missing, with_kernels(self.inputs, graph, wanted.kernels)
        )

    def lanes(self, on_progress: Progress | None = None) -> list[Lane]:
        """Read the traces and return the activity of each lane, as intervals on the controller's
        clock.

        The result is not cached: each call reads the traces again.

        Args:
            on_progress: Called with each trace once it is read.

        Raises:
            TraceFormatError: There is neither a manifest nor a readable trace.
        """
        from verl_profiling.steps.read import read_lanes

        return read_lanes(self.inputs, on_progress)[0].lanes

    def to_frame(self, name: FrameName) -> DataFrame:
        """Return one table of the report as a pandas data frame.

        Args:
            name: The table. The first column is the step, the others are the fields of the row
                class in :mod:`verl_profiling.numbers.report_columns`. The idle time of a worker has
                one column per cause, ``lost_<cause>_us``. The table ``requests`` comes from the
                manifest; no trace is read for it.

        Raises:
            ConfigError: There is no table of this name.
            ToolUnavailableError: pandas is not installed.
            TraceFormatError: There is neither a manifest nor a readable trace.
        """
        from verl_profiling.report.exports import data_frame
        from verl_profiling.report.tables import TABLES
        from verl_profiling.steps.requests import RequestRow, requests

        choices = (*TABLES, "requests")
        if name not in choices:
            raise ConfigError(
                "to_frame", f"unknown table {name!r}; {choices_hint(str(name), choices)}"
            )
        steps = self.by_step()
        if name == "requests":
            tables = [
                (step.step, requests(step.manifest) if step.manifest else []) for step in steps
            ]
            return data_frame(RequestRow, tables)
        table = TABLES[name]
        return data_frame(table.row, [(step.step, table.rows(step.report())) for step in steps])

    def merge(
        self,
        output: str | os.PathLike[str] | None = None,
        *,
        stages: Sequence[str] = (),
        ranks: str | None = None,
        min_us: float = 0.0,
        max_bytes: int | None = None,
        critical_path: bool = False,
        jobs: int = 1,
        on_progress: Progress | None = None,
    ) -> MergeResult:
        """Write the step's timeline.

        Args:
            output: File to write; by default ``timeline.json.gz`` in the step's folder, or
                e.g. ``timeline.ranks_0.json.gz`` for a part of the step.
            stages: Stages whose events are kept; by default all.
            ranks: Ranks to keep of each role, e.g. ``0,8-15``.
            min_us: Minimum duration of kept events (us).
            max_bytes: Maximum size of the timeline; the shortest events are left out.
            critical_path: Whether the first process on the timeline is the critical path; finding
                the path takes as much time and memory as a report.
            jobs: Number of processes. If ``jobs > 1`` and the caller has threads, its main module
                must be importable, because ``multiprocessing`` then starts processes with
                ``spawn``.
            on_progress: Called with each trace after its merge.

        Raises:
            ConfigError: The step has no such stage or rank, or ``output`` is one of its traces.
            TraceFormatError: The step has no readable trace.
            OSError: The timeline cannot be written.
        """
        from verl_profiling.timeline.merge import merge, select_ranks, stage_windows

        inputs = self.inputs if ranks is None else select_ranks(self.inputs, ranks)
        windows = stage_windows(inputs, stages) if stages else self._window()
        selection = {
            "ranks": ranks or "",
            "stages": ",".join(stages),
            "min_us": f"{min_us:g}" if min_us else "",
            "max_bytes": max_bytes or "",
        }
        label = ".".join(f"{name}_{value}" for name, value in selection.items() if value)
        path = self.inputs.output(TIMELINE_NAME, label)
        if output is not None:
            path = real_folder(Path(output).parent) / Path(output).name
        if any(path.resolve() == read.path.resolve() for read in self.inputs.files):
            raise ConfigError("output", f"{path} is one of the input traces")
        return merge(
            inputs,
            path,
            keep=Keep(min_us=min_us, windows_ns=windows),
            max_bytes=max_bytes,
            jobs=jobs,
            on_progress=on_progress,
            critical_path=cache(lambda: list(self._critical_path())) if critical_path else tuple,
        )

    def _critical_path(self) -> Iterator[Slice]:
        """Yield the critical path of each step of the capture;
        plain traces have none on their timeline.
        """
        for step in self.by_step():
            if step.manifest is not None:
                for row in step.report().critical_path:
                    begin_ns = step.manifest.begin_ns + round(row.begin_us * 1000)
                    about = {"stage": row.stage, "process": row.who, "kind": row.kind}
                    yield (
                        f"{row.who}: {row.kind}",
                        begin_ns,
                        begin_ns + round(row.duration_us * 1000),
                        about,
                    )

    def check(self) -> CheckResult:
        """Read every artifact to its last byte, and report missing, empty and damaged artifacts.

        Raises:
            TraceFormatError: There is nothing to check.
        """
        return check(self.directory, self.inputs.limits, self.inputs.ray)

    def output(self, name: str) -> Path:
        """Return the default path of a result: next to the traces, with a unique name for the step.

        Args:
            name: Usual file name of the result, e.g. ``report.json``.
        """
        return self.inputs.output(name)

    def _window(self) -> tuple[tuple[int, int], ...]:
        """Return begin and end (unix ns) of a step in traces of several steps,
        else an empty tuple.
        """
        manifest = self.inputs.manifest
        if manifest is None or not self.inputs.capture:
            return ()
        return ((manifest.begin_ns, manifest.end_ns),)
