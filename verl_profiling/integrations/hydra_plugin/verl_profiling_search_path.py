"""Adds the config group ``profiling`` to every Hydra application; installed in ``hydra_plugins``.

Hydra imports this module at the start of each application, so it imports nothing but Hydra.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

__all__ = ["ProfilingSearchPath"]


class ProfilingSearchPath(SearchPathPlugin):
    """Makes ``+profiling=e2e`` work without ``hydra.searchpath``.

    Groups of the application have precedence.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder of this package's config group."""
        search_path.append(provider="verl_profiling", path="pkg://verl_profiling.conf")
