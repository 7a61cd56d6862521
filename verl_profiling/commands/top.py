"""``verl-profiling top``."""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from verl_profiling.commands import EXIT_FINDING, EXIT_OK, at_least_0, local_path, option
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.report.terminal import fitting_console
from verl_profiling.report.watch_frame import (
    Pulse,
    captures_so_far,
    logged_steps,
    thresholds_of,
    watch_frame,
)
from verl_profiling.run_files import read_run
from verl_profiling.step_summary import StepSummary
from verl_profiling.timeline.inputs import the_run
from verl_profiling.units import duration
from verl_profiling.watch_log import WATCH_LOG, WatchLogReader, has_watch_log, latest_step

_STEPS = 200
_CAPTURES = 5
_FASTEST_S = 0.1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Shows a running job, live: its last step, and whether steps get longer; where the "
        "time of a step "
        "goes (exposed time, by stage), and which process leads there; memory, and the "
        "captures so far. It "
        f"reads {WATCH_LOG} in the run's folder, which a run with watch.enable=true writes, "
        "and asks nothing "
        "of the job. Ctrl-C quits; it ends by itself when the run does. Where the output is no "
        "terminal, it prints one frame."
    )
    parser.epilog = (
        "example: verl-profiling top outputs/run --interval 5. exit codes: 0 quit, or the "
        "run has ended; "
        "1 its process is gone without a word, or a step hangs; 2 there is no such run, or "
        "it has no watch"
    )
    parser.add_argument("run_dir", type=local_path, metavar="RUN_DIR", help="folder of a run")
    option(parser, "--once", "print one frame and exit")
    seconds = at_least_0("a time in seconds such as 2")
    option(
        parser,
        "--interval SECONDS",
        "seconds between updates (default: %(default)g)",
        seconds,
        default=2.0,
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the run until the user quits or the run ends."""
    run_dir = the_run(arguments.run_dir, live=True)
    if not run_dir.is_dir():
        raise TraceFormatError(run_dir, "no such folder of a run")
    view = View(run_dir)
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal:
        fitting_console(console).print(view.frame())
    else:
        with (
            suppress(KeyboardInterrupt),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            live.update(view.frame("Ctrl-C quits"), refresh=True)
            while not view.pulse.is_over:
                time.sleep(max(arguments.interval, _FASTEST_S))
                live.update(view.frame("Ctrl-C quits"), refresh=True)
        if view.pulse.is_over:
            console.print(view.frame())
    return EXIT_OK if view.pulse.is_well else EXIT_FINDING


class View:
    """A live view of a run.

    Raises:
        TraceFormatError: The run has no watch log, and its watch is off.

    Attributes:
        pulse: State of the run at the last frame: running, ended, or gone.
    """

    pulse = Pulse(says="not shown yet")
    # a file that fails once, as on a busy share, is read again for the next frame
    _may_fail = False

    def __init__(self, run_dir: Path) -> None:
        self._run = run_dir
        self._log = WatchLogReader(run_dir)
        self._steps: list[StepSummary] = []
        self._latest: list[StepSummary] = []
        self._info: RunInfo | None = None
        if not (has_watch_log(run_dir) or ((info := read_run(run_dir)) and info.is_watched)):
            raise TraceFormatError(
                run_dir,
                f"has no {WATCH_LOG}; start the run with watch.enable=true to have its "
                "steps logged",
            )

    def frame(self, footer: str = "") -> RenderableType:
        """Read the new steps of the watch log, and return the frame to show."""
        try:
            self._read()
            self._may_fail = True
        except TraceFormatError:
            if not self._may_fail:
                raise
            self._may_fail = False
        captures, thresholds = captures_so_far(self._run, _CAPTURES), thresholds_of(self._info)
        return watch_frame(
            self._run.resolve().name,
            self.pulse,
            self._steps,
            *captures,
            footer,
            thresholds=thresholds,
        )

    def _read(self) -> None:
        lines: list[StepSummary] = []
        try:
            lines.extend(self._log.read())
        finally:  # lines before an error are not read again
            self._steps = logged_steps(lines, self._steps)[-_STEPS:]
            self._latest = latest_step([*self._latest, *lines])
        self._info = read_run(self._run)
        self.pulse = _pulse(self._run, self._info, "".join(line.hangs for line in self._latest))


def _pulse(run: Path, info: RunInfo | None, hangs: str) -> Pulse:
    heard = "no step logged yet"
    with suppress(OSError):  # the log does not exist, or was just rotated
        quiet_s = time.time() - (run / WATCH_LOG).stat().st_mtime
        heard = f"{'hang' if hangs else 'last step'} logged {duration(max(round(quiet_s), 0))} ago"
    if info is None:
        return Pulse(says=f"has no {RUN_NAME}; {heard}", hangs=hangs, is_well=not hangs)
    if not info.over:
        return Pulse(says=f"{info.process}, {heard}", hangs=hangs, is_well=not hangs)
    is_well = info.end_ns is not None and not hangs
    return Pulse(says=f"{info.over}; {heard}", hangs=hangs, is_over=True, is_well=is_well)
