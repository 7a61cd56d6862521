"""``verl-profiling upload``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME
from verl_profiling.remote import RemoteFolder
from verl_profiling.visible import visible

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Uploads what waits in a folder because its upload failed or its process ended; the log of the run "
        "names the folder, the host and the URL. Each file is verified, and then removed here; manifests "
        "go last. Exits 1 when one could not be uploaded; it may be repeated."
    )
    parser.epilog = "example: verl-profiling upload /tmp/verl-profiling-0/grpo-1f2e3d4c s3://bucket/grpo"
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="run folder or step folder on this host")
    parser.add_argument("url", metavar="URL", help="the same folder of the run, e.g. s3://bucket/run")
    parser.add_argument("--keep", action="store_true", help="remove nothing here")


def run(arguments: argparse.Namespace) -> int:
    """Upload what is there."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise TraceFormatError(folder, "no such folder")
    remote = RemoteFolder(arguments.url)
    code = EXIT_OK
    for path in _waiting(folder):
        name = path.relative_to(folder).as_posix()
        try:
            remote.put(path, name)
        except Exception as error:  # each file system raises errors of its own
            print(visible(f"failed      {name}  {type(error).__name__}: {error}"))
            code = EXIT_FINDING
            continue
        print(visible(f"uploaded    {name}"))
        if not arguments.keep:
            path.unlink()
    return code


def _waiting(folder: Path) -> Iterator[Path]:
    """Yield the files to upload, manifests last; a name with a dot is of a file that is being written."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    yield from sorted(files, key=lambda path: path.name == MANIFEST_NAME)
