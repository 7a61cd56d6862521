"""What the files of a run say of its starts, kept up to date by the start that runs.

A start creates a file of its own, which is its claim, and nobody else writes there. ``run.json``, the file
of the first one, gets a copy of each later start. So one file says how often a run was started and with
which settings, and a start that could not be added there is still on record in its own file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from verl_profiling import clock
from verl_profiling.controller.run_claim import RunFolder
from verl_profiling.identity import step_folder_name
from verl_profiling.run_files import run_file_name, write_json_atomically

__all__ = ["RunRecord"]

logger = logging.getLogger(__name__)


class RunRecord:
    """The record of a run whose folder was claimed.

    Args:
        run: The folder, with what it said of the starts when it was claimed.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        *self._earlier, self._own = run.starts

    def enter(self) -> None:
        """Add this start to the first one's file."""
        if self._earlier:
            self._write()

    def files_stay_on(self, hosts: Iterable[str]) -> None:
        """Enter the hosts whose files cannot be seen from here."""
        self._own = msgspec.structs.replace(self._own, node_local=sorted(hosts))
        self._write()

    def train_ends(self, first_step: int, last_step: int, never_came: list[int]) -> None:
        """Enter how far this start came, and the steps of the schedule that no start came to."""
        self._own = msgspec.structs.replace(
            self._own,
            first_step=first_step,
            last_step=last_step,
            end_ns=clock.now_ns(),
            never_came=never_came,
        )
        self._write()
        if self._run.remote is not None:
            self._run.remote.publish_run_files()

    def came(self, step: int) -> bool:
        """Return whether an earlier start came to a step, as its folder or the start's own record says."""
        name, remote = step_folder_name(step), self._run.remote
        if (self._run.path / name).exists() or (remote is not None and name in remote.steps):
            return True
        spans = ((start.first_step, start.last_step) for start in self._earlier)
        return any(first is not None and last is not None and first <= step <= last for first, last in spans)

    def _write(self) -> None:
        """Write this start's file, and the first one's, which may be the same."""
        first, *later = (*self._earlier, self._own)
        copies = [msgspec.structs.replace(start, later_starts=[]) for start in later]
        try:
            for info in (msgspec.structs.replace(first, later_starts=copies), *later[-1:]):
                write_json_atomically(self._run.path / run_file_name(info.start), info)
        except OSError as error:
            logger.warning("start %d of the run is not on record as it is now: %s", self._own.start, error)
