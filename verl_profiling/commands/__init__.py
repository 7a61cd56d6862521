"""The subcommands of ``verl-profiling``, one module each.

A module has ``configure(parser)``, which describes it, and ``run(arguments)``, which does
the work and returns the exit code. It is imported only when its command is used, so that
``--help`` is quick and merging loads no numerical library.
"""

from __future__ import annotations

__all__ = ["COMMANDS", "EXIT_BAD_INPUT", "EXIT_FINDING", "EXIT_OK"]

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_BAD_INPUT = 2

COMMANDS = {
    "merge": "write one timeline of a step, to open in Perfetto",
    "report": "show where the time of a step went",
    "view": "open a step's timeline and report in the browser",
    "diff": "compare two steps or two runs",
    "split": "cut an e2e trace into its stages",
    "collect": "fetch reports that Nsight Systems finished after the run",
    "check": "verify that every expected artifact is there and whole",
    "plan": "print what a configuration would capture, and in how many files",
    "doctor": "show what this machine can record, and whether a config can run here",
}
"""Purpose of each command, in the order of ``--help``."""
