"""Copies the folder of a run behind a URL, and keeps the copy up to date."""

from __future__ import annotations

import re
import time
from pathlib import Path, PurePosixPath

from verl_profiling.files.opener import remove_file
from verl_profiling.files.remote import RemoteFolder
from verl_profiling.files.run_files import HANGS

_LEAST_S = 1.0  # between two listings: a store may take a tenth of that
_OF_A_RUN = re.compile(r"(?:(?:hangs|processes|step_[\d.]+)/)*[^/]+\.(?:json|jsonl)")


class Mirror:
    """A local copy of a run behind a URL, without recordings until a step is asked for.

    Args:
        url: The URL of the run.
        folder: Folder of the copy.

    Raises:
        ToolUnavailableError: There is no file system for the URL.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self._url = url
        self._known: dict[str, dict[str, object]] = {}
        self._next_s = 0.0
        RemoteFolder(url)

    def fetch(self, step: str = "") -> None:
        """Download what is new, and all files of a step.

        Of files that were removed there, only those of a hang that is over are removed here.

        Args:
            step: Name of the step folder; empty for none.
        """
        if not step and time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LEAST_S
        remote = RemoteFolder(self._url)
        files = remote.files()
        for name in [name for name in self._known if name.startswith(f"{HANGS}/")]:
            if name not in files:
                del self._known[name]
                remove_file(self.folder / name)
        for name, facts in files.items():
            wanted = _OF_A_RUN.fullmatch(name) or (step and name.startswith(f"{step}/"))
            if wanted and self._known.get(name) != facts and ".." not in PurePosixPath(name).parts:
                remote.get(name, self.folder / name)
                self._known[name] = facts
