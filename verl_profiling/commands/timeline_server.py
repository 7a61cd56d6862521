"""Serves timelines and pages on this machine, and the Perfetto UI beside them."""

from __future__ import annotations

import http.server
import os
from collections.abc import Mapping
from errno import EADDRINUSE
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit

from verl_profiling.errors import ConfigError, ProfilingError
from verl_profiling.files.opener import opened

PERFETTO_PORT = 9001
"""The only port that ``ui.perfetto.dev`` may fetch a local trace from; needs a CORS header, see
https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui ("local trace files").
"""

HTML, TIMELINE = "text/html; charset=utf-8", "application/gzip"
"""Types of the served files."""

_ONLINE_UI = "https://ui.perfetto.dev"
_OWN_NAMES = ("127.0.0.1", "localhost")


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
