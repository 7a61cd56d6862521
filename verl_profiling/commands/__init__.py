"""One module per command of ``verl-profiling``; their list is in :mod:`verl_profiling.cli`."""
