"""Lists the packages, and writes the description and the archive for a package index; all other
metadata is in ``setup.cfg``.
"""

import gzip
import os
import re
import tarfile
import time
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

# A path of the repository leads nowhere on the page of a package index.
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


def description() -> str:
    """Return the README without pictures of the repository; links into it are plain words."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    return _LINK.sub(r"\1", _PICTURE.sub("", readme))


class SourceDistribution(sdist):
    """Writes equal bytes for equal files and an equal ``SOURCE_DATE_EPOCH``, as wheels do."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, **owner):
        """Write the archive, whatever ``format`` is, and return its path."""
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def normal(member):
            member.mtime = epoch
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            Path(path).open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=normal)  # sorts the names
        return path


# Hydra finds plugins in this namespace package only; ``package_dir`` says where ours is.
setup(
    packages=[*find_packages(include=["verl_profiling*"]), "hydra_plugins"],
    long_description=description(),
    cmdclass={"sdist": SourceDistribution},
)
