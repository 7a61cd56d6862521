"""Hydra config group ``profiling``; add ``pkg://verl_profiling.conf`` to the search path."""
