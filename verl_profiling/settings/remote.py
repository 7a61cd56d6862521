"""How a run behind a URL is written: the ``remote`` group of the configuration."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.errors import ConfigError
from verl_profiling.settings.typed_values import check_seconds

__all__ = ["RemoteOptions"]


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """What happens where ``save_path`` is a URL; elsewhere it is not used.

    Attributes:
        staging: Folder on each host in which files wait for their upload; ``None`` for one of this user's
            in the system's temporary folder.
        retry_s: How long the upload of a file is tried again, in seconds. What fails stays in ``staging``.
    """

    staging: str | None = None
    retry_s: float = 60.0

    def __post_init__(self) -> None:
        if self.staging is not None and not Path(self.staging).is_absolute():
            raise ConfigError(
                "staging", f"{self.staging!r} must be an absolute path: it is used on every host"
            )
        check_seconds("retry_s", self.retry_s)

    @property
    def staging_folder(self) -> Path:
        """The folder on this host."""
        return Path(self.staging or f"{tempfile.gettempdir()}/verl-profiling-{os.getuid()}").absolute()
