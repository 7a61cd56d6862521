"""Uploads what was written, tries again, and removes it here once it is there."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_profiling.manifest import Artifact
from verl_profiling.remote import RemoteFolder, put_again
from verl_profiling.tools.base import Output

__all__ = ["Finish", "Retries", "Upload", "remove_empty", "remove_uploaded", "uploaded"]

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


Finish = Callable[[], Artifact | float]
"""Returns an artifact's final state, or after how many seconds it is to be called again."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files of a capture go.

    Attributes:
        url: The step folder there.
        retry_s: How long an upload is tried again.
    """

    url: str
    retry_s: float


class Retries:
    """When to try next: after longer and longer waits, until the time is up.

    Args:
        retry_s: How long to try, from the first failure on.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._wait_s = _FIRST_WAIT_S
        self._end_s: float | None = None

    def next_s(self) -> float | None:
        """Return after how many seconds to try again; ``None``: no more."""
        now_s = time.monotonic()
        self._end_s = now_s + self._retry_s if self._end_s is None else self._end_s
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, _LONGEST_WAIT_S)
        return wait_s if now_s + wait_s <= self._end_s else None


def uploaded(output: Output, folder: str, upload: Upload | None) -> tuple[Artifact, Finish | None]:
    """Return an output's artifact and what is left to do on it; its upload too, if it is to be uploaded."""
    artifact = output.artifact
    if upload is None or not (output.finish or artifact.status in ("ok", "truncated")):
        return artifact, output.finish
    finish = output.finish or (lambda: artifact)
    pending = msgspec.structs.replace(artifact, status="pending")
    return pending, _ArtifactUpload(finish, Path(folder), upload)


class _ArtifactUpload:
    """Finishes an artifact and uploads it; called again until it is there or the time is up."""

    def __init__(self, finish: Finish, folder: Path, upload: Upload) -> None:
        self._finish = finish
        self._folder = folder
        self._upload = upload
        self._retries = Retries(upload.retry_s)
        self._artifact: Artifact | None = None

    def __call__(self) -> Artifact | float:
        if self._artifact is None:
            finished = self._finish()
            if not isinstance(finished, Artifact):
                return finished
            self._artifact = finished
        artifact, local = self._artifact, self._folder / self._artifact.path
        if not local.exists():  # empty or failed, or removed meanwhile
            return artifact
        try:
            RemoteFolder(self._upload.url).put(local, artifact.path)
        except Exception as error:  # each file system raises errors of its own
            wait_s = self._retries.next_s()
            if wait_s is not None:
                return wait_s
            logger.error(
                "%s was not uploaded to %s: %s: %s; it stays in %s. To upload it: %s",
                *(artifact.path, self._upload.url, type(error).__name__, error),
                *(self._folder, put_again(self._folder, self._upload.url)),
            )
            reason = f"not uploaded: {type(error).__name__}: {error}"
            return msgspec.structs.replace(
                artifact,
                where=f"{socket.gethostname()}:{local}",
                reason="; ".join(filter(None, (artifact.reason, reason))),
            )
        remove_uploaded(local)
        return artifact


def remove_uploaded(path: Path) -> None:
    """Remove what was uploaded; its folder stays, because others may write there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> bool:
    """Remove a folder unless there is a file in it; return whether."""
    if any(names for _, _, names in os.walk(folder)):  # whose folders others may remove meanwhile
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True
