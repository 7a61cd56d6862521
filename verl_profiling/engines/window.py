"""One capture of an engine: the expected artifacts, and the files that become these artifacts."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.result_file import ResultFile
from verl_profiling.engines.adapter import EngineAdapter
from verl_profiling.files.opener import make_folder, move_file
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, ToolSpan, expected_artifact
from verl_profiling.settings.roles import RoleConfig
from verl_profiling.tools.base import EngineRanges, Output

logger = logging.getLogger(__name__)

_MERGED_SUFFIX = ".merged.gz"  # no suffix of a trace: a report would count all ranks twice


@dataclass(eq=False)
class Window(ABC):
    """One capture of an engine, from the start to the result.

    Args:
        file: Result file of the capture.
        role: Settings of the replica's role.
        engine: The engine's adapter.
        identity: Role, rank and host of the replica.
        ranks: The ranks inside the replica that are selected; empty to log requests alone.

    Attributes:
        request: The request of the capture.
        expected: The expected artifacts.
        end_ns: Time of the end of recording (ns); 0 before.
        timer: Ends recording after ``rollout.max_window_s``.
    """

    file: ResultFile
    role: RoleConfig
    engine: EngineAdapter
    identity: WorkerIdentity
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        self.request = self.file.request
        self.end_ns = 0
        self.timer: asyncio.TimerHandle | None = None
        self.notes: list[str] = []
        self.tool_spans: list[ToolSpan] = []
        self.anchor = clock.read_anchor()
        tool, occurrence = self.engine.tool, self.request.occurrence
        self.expected = [
            expected_artifact(lane, tool.name, tool.suffix, stage, occurrence)
            for lane, stage in self.recordings()
        ]

    @abstractmethod
    def recordings(self) -> list[tuple[str, str | None]]:
        """Return lane and stage of each expected artifact."""

    @abstractmethod
    def outputs(self, problem: str) -> list[Output]:
        """Return the artifacts that the engine wrote, after its stop.

        Args:
            problem: Reason why the stop failed; empty if it succeeded.

        Raises:
            OSError: A trace cannot be moved.
        """

    def opened(self) -> None:
        """Note that the engine records from now on."""
        self._stamp(begin_ns=clock.now_ns())

    def ended(self) -> None:
        """Note that the engine records no more from now on."""
        self.end_ns = clock.now_ns()
        self._stamp(end_ns=self.end_ns)

    def _stamp(self, **time_ns: int) -> None:
        self.expected = [msgspec.structs.replace(one, **time_ns) for one in self.expected]

    def gather(self, problem: str) -> list[Output]:
        """Return the artifacts with their status, after the stop of the engine.

        The spool is removed with its remaining files, e.g. traces of unselected ranks.

        Args:
            problem: Reason why the stop failed; empty if it succeeded.
        """
        try:
            return self.outputs(problem)
        except OSError as error:
            reason = f"the trace of {self.engine.name} cannot be moved: {error}"
            logger.error("%s: step %d: %s", self.identity, self.request.step, reason)
            return [Output(artifact) for artifact in self.failed(reason)]
        finally:
            self.engine.remove_spool()

    def failed(self, reason: str) -> list[Artifact]:
        """Return all expected artifacts with the status ``failed``."""
        return [artifact.with_status("failed", reason) for artifact in self.expected]


class SpoolWindow(Window):
    """A capture in which each rank of the engine writes a file or folder into the engine's spool.

    After the stop, these move from the spool into the step folder.

    Raises:
        OSError: The spool folder cannot be made.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        make_folder(self.engine.spool)
        self._before = set(self.engine.spool.iterdir())

    def recordings(self) -> list[tuple[str, str | None]]:
        stage = self.request.stage
        return [
            (self.identity.lane(rank), "_".join(filter(None, [stage, part])) or None)
            for rank, part in self._places()
        ]

    def _places(self) -> list[tuple[int, str]]:
        return [(rank, part) for rank in self.ranks for part in self.engine.parts]

    def outputs(self, problem: str) -> list[Output]:
        paths = self._new_paths() if self.request.keep else []
        written = self._written(paths)
        outputs = [
            self._output(artifact, written.get(place), problem)
            for place, artifact in zip(self._places(), self.expected, strict=True)
        ]
        if self.ranks and self.request.keep and self.engine.window.merge_profiles:
            outputs.append(self._merged(self.engine.merged_in(paths)))
        return outputs

    def _new_paths(self) -> list[Path]:
        """Return what the engine wrote in this window, the newest last."""
        spool = self.engine.spool
        new_paths = set(spool.iterdir()) - self._before if spool.is_dir() else set()
        return sorted(new_paths, key=lambda path: path.stat().st_mtime_ns)

    def _written(self, paths: Sequence[Path]) -> dict[tuple[int, str], Path]:
        """Return the newest trace of each rank and part."""
        written = {}
        for path in paths:
            rank = self.engine.identify(path)
            if rank is None:
                continue
            part = self.engine.part_of(path)
            if part is None:  # recording was stopped inside of it
                first, *later = self.engine.parts
                part = later[0] if (rank, first) in written else first
            written[rank, part] = path
        return written

    def _merged(self, written: Path | None) -> Output:
        """Return the file of all ranks, which no report reads: it repeats the ranks' traces."""
        tool, name = self.engine.tool.name, self.identity.name
        stage, occurrence = self.request.stage, self.request.occurrence
        merged = expected_artifact(name, tool, _MERGED_SUFFIX, stage, occurrence)
        if written is None:
            return Output(merged.with_status("failed", f"{self.engine.name} merged no traces"))
        final = Path(self.request.folder, merged.path)
        move_file(written, final)
        return Output(merged.with_status("ok", bytes=final.stat().st_size))

    def _output(self, artifact: Artifact, written: Path | None, problem: str) -> Output:
        engine = self.engine
        if written is not None:
            final = Path(self.request.folder, artifact.path)
            return engine.tool.engine_output(written, final, artifact, engine.device)
        if engine.window.bounded and not problem:
            reason = f"the recording window never began ({engine.window})"
            return Output(artifact.with_status("empty", reason))
        silent = f"{engine.name} reported no error and wrote no trace; its own log may say why"
        return Output(artifact.with_status("failed", problem or silent))


@dataclass(eq=False)
class RangeWindow(Window):
    """A capture that is one range of the tool, e.g. ``nsys``, under which the engine was launched.

    The tool writes one report for all processes of a replica, which is collected after the run.

    Args:
        ranges: The ranges that the tool records of this process.

    Raises:
        CaptureStateError: The tool would not record another range.
    """

    ranges: EngineRanges

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranges.check(self.identity.name)

    def recordings(self) -> list[tuple[str, str | None]]:
        return [(self.identity.name, self.request.stage)]

    def opened(self) -> None:
        super().opened()
        self.ranges.note_opened(Path(self.request.folder), self.expected[0].path)

    def outputs(self, problem: str) -> list[Output]:
        [artifact] = self.expected
        run = Path(self.request.folder).parent
        pending = self.ranges.note_closed(artifact, run, keep=self.request.keep)
        return [Output(artifact.with_status("failed", problem) if problem else pending)]
