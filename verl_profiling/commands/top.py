"""Shows a running job, live, from the watch.jsonl of a run with watch.enable=true.

Shown are its last step, and whether steps get longer; by how much each stage makes a step longer
(its exposed time), and for which process the others wait there; memory, and the captures so far.
Only files are read; no call goes to the job. Ctrl-C quits; the command ends by itself when the run
does. Where the output is no terminal, it prints one frame. Exits 1 when the run's process is gone
before the end of training, when an exception ended it, and when a step hangs.

example: verl-profiling top outputs/run --interval 5
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress

from rich.console import Console

from verl_profiling.commands.common import add_json, at_least_0, local_path, option, print_json
from verl_profiling.commands.live_run import LiveRun
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import read_run
from verl_profiling.files.watch_log import WATCH_LOG, has_watch_log
from verl_profiling.report.console import fitting_console
from verl_profiling.report.watch_frame import RunView, watch_frame
from verl_profiling.steps.inputs import the_run

_FASTEST_S = 0.1  # the shortest interval


DOCUMENTS = (RunView,)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", type=local_path, metavar="RUN", help="folder of a run")
    option(parser, "--once", "print one frame and exit")
    add_json(parser, "once")
    seconds = at_least_0("a time in seconds such as 2")
    option(
        parser,
        "--interval SECONDS",
        "seconds between updates (default: %(default)g)",
        seconds,
        default=2.0,
    )


def run(arguments: argparse.Namespace) -> bool:
    """Show the run until the user quits or the run ends; return whether it is well."""
    folder = the_run(arguments.run, live=True)
    if not folder.is_dir():
        raise TraceFormatError(folder, "no such folder of a run")
    if not (has_watch_log(folder) or ((info := read_run(folder)) and info.is_watched)):
        raise TraceFormatError(
            folder,
            f"has no {WATCH_LOG}; start the run with watch.enable=true to log its steps",
        )
    live_run = LiveRun(folder)
    console = Console(highlight=False)
    if arguments.json:
        view = live_run.read()
        print_json(view)
    elif arguments.once or not console.is_terminal:
        view = live_run.read()
        fitting_console(console).print(watch_frame(view))
    else:
        view = _follow(live_run, console, arguments.interval)
    return view.is_well


def _follow(live_run: LiveRun, console: Console, interval_s: float) -> RunView:
    """Show the run until the user quits or the run ends; return the last view."""
    from rich.live import Live  # a fifth of the import of rich, which one frame does not need

    view = RunView(run=live_run.run)
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            view = live_run.read()
            live.update(watch_frame(view, "Ctrl-C quits"), refresh=True)
            if view.is_over:
                break
            time.sleep(max(interval_s, _FASTEST_S))
    if view.is_over:
        console.print(watch_frame(view))
    return view
