"""The subcommands of ``verl-profiling``, one module each; they are listed in :mod:`verl_profiling.cli`.

A module has ``configure(parser)``, which describes it, and ``run(arguments)``, which does
the work and returns the exit code. It is imported only when its command is used, so that
``--help`` is quick and merging loads no numerical library.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FINDING = 1
EXIT_BAD_INPUT = 2
