"""The subcommands of ``verl-profiling``, one module each; they are listed in :mod:`verl_profiling.cli`.

A module has ``configure(parser)``, which describes the command, and ``run(arguments)``, which runs it
and returns the exit code. A module is imported only when its command is used, so that ``--help`` is
quick and ``merge`` loads no numerical library.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_BAD_INPUT = 2
