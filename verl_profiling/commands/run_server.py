"""Serves the page of a run that may go on, and the reports and timelines of its captures.

Nothing is written into the folder of the run.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from verl_profiling.analysis import CapturedStep, open_steps
from verl_profiling.commands.live_run import LiveRun
from verl_profiling.commands.timeline_server import HTML, TIMELINE, TimelineServer
from verl_profiling.files.mirror import Mirror
from verl_profiling.files.opener import opened
from verl_profiling.files.run_files import HANGS
from verl_profiling.files.watch_log import WATCH_LOG
from verl_profiling.manifest import RUN_NAME
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.run_page import RUN_PAGE, render_run
from verl_profiling.report.run_steps import RunCapture
from verl_profiling.report.watch_frame import CaptureHead, capture_heads
from verl_profiling.steps.deaths import attempts_of
from verl_profiling.steps.inputs import how_to_capture
from verl_profiling.steps.step import TIMELINE_NAME
from verl_profiling.units import visible_text_of

_MOST_STEPS = 20_000
_REFRESH_S = 5  # a page without news changes too: it says how long ago the last step ended
_PREFIX = "run/"  # the user interface of Perfetto has an index.html of its own
_OF_A_STEP = re.compile(rf"{_PREFIX}(step_[\d.]+)/([\w.]+)")

Parts = list[tuple[CapturedStep, Report]]
"""The steps of a capture, with their reports."""


class RunServer(TimelineServer):
    """Serves the page of a run, rendered anew when something is new.

    Args:
        run: The run's folder.
        temporary: Folder for merged timelines.
        ui: Folder of the Perfetto UI, or ``None`` to use ``ui.perfetto.dev``.
        port: The port.
        mirror: Downloads the run, if it is behind a URL.
    """

    def __init__(
        self, run: Path, temporary: Path, ui: Path | None, port: int, mirror: Mirror | None = None
    ) -> None:
        super().__init__(run / TIMELINE_NAME, {}, ui, port)
        self._run, self._temporary, self._mirror = run, temporary, mirror
        self._live = LiveRun(run, _MOST_STEPS)
        self._captures: dict[str, Future[Parts]] = {}
        # One: reading traces must not take the processors of a job on this machine.
        self._reader = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._rendered: tuple[object, bytes] = (None, b"")

    @property
    def page_url(self) -> str:
        """The address of the page."""
        return self.address(f"{_PREFIX}{RUN_PAGE}")

    def find(self, name: str) -> tuple[BinaryIO, str] | None:
        """Return the page, or a report or timeline of a step."""
        is_root = not name and self.ui is None  # else the user interface is there
        if is_root or name == f"{_PREFIX}{RUN_PAGE}":
            return BytesIO(self.page()), HTML
        of_step = _OF_A_STEP.fullmatch(name)
        if of_step is None:
            return None
        with self._lock:
            capture = self._parts_of(of_step[1])
        parts = capture.result()
        for step, report in parts:
            if step.output("report.html").name == of_step[2]:
                return BytesIO(render_html(report).encode()), HTML
        if of_step[2] == TIMELINE_NAME:
            return opened(self._timeline_of(parts[0][0])), TIMELINE
        return None

    def page(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            if self._mirror is not None:
                self._mirror.fetch()
            version = (*self._version(), int(time.monotonic() / _REFRESH_S))
            if version != self._rendered[0]:
                self._rendered = version, self._render().encode()
            return self._rendered[1]

    def _version(self) -> Iterator[object]:
        for name in ("", WATCH_LOG, RUN_NAME, HANGS):
            path = self._run / name
            yield path.stat().st_mtime_ns if path.exists() else 0
        yield [capture.done() for capture in self._captures.values()]

    def _render(self) -> str:
        heads = capture_heads(self._run)
        view = self._live.read("" if heads else how_to_capture(self._run))
        captures: list[RunCapture] = []
        for name, head in heads.items():
            captures += self._captured(name, head or CaptureHead("begun"))
        return render_run(view, captures, [*attempts_of(self._run)], follows=True)

    def _captured(self, name: str, head: CaptureHead) -> Iterator[RunCapture]:
        """Yield the steps of a capture, as far as they are known."""
        folder = f"{_PREFIX}{name}/"
        timeline = folder + TIMELINE_NAME
        address = self.page_address(f"{folder}report.html", timeline)
        if name in self._captures:
            capture = self._captures[name]
        elif head.state == "begun":
            yield RunCapture(name, head, problem="it is recorded now")
            return
        elif self._mirror is not None:
            yield RunCapture(name, head, address, problem="open it to read its recordings")
            return
        else:
            capture = self._parts_of(name)
        if capture.done() and (error := capture.exception()):
            yield RunCapture(name, head, problem=str(error))
        elif capture.done():
            for step, report in capture.result():
                page = folder + step.output("report.html").name
                links = self.page_address(page, timeline), self.timeline_address(timeline)
                yield RunCapture(name, head, *links, visible_text_of(report))
        else:
            yield RunCapture(name, head, address, problem="it is read now")

    def _parts_of(self, name: str) -> Future[Parts]:
        """Return the steps of a capture, which are read in the background."""
        if name not in self._captures:
            self._captures[name] = self._reader.submit(self._read, name)
        return self._captures[name]

    def _read(self, name: str) -> Parts:
        if self._mirror is not None:
            self._mirror.fetch(name)
        steps, _ = open_steps([self._run / name])
        return [(step, step.report()) for capture in steps for step in capture.by_step()]

    def _timeline_of(self, step: CapturedStep) -> Path:
        """Return the timeline of a step, merged if it is not there."""
        timeline = step.output(TIMELINE_NAME)
        if timeline.is_symlink() or not timeline.is_file():
            timeline = self._temporary / f"{step.directory.name}.{TIMELINE_NAME}"
            if not timeline.exists():
                step.merge(timeline)
        return timeline
