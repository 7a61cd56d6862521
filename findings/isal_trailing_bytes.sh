#!/usr/bin/env bash
# isal raises for bytes behind the end of a gzip file what it raises for a file that was cut off.
#
# Version:   isal 1.9.1 (igzip), beside Python's own gzip
# Behaviour: A whole gzip member followed by other bytes (a line that a store or a log rotation appended) raises EOFError,
#            as does half of a member. Python's gzip names the first: BadGzipFile, "Not a gzipped file". So a reader of
#            traces that takes EOFError for "the job died while writing" calls a whole trace damaged.
# Seen:      isal 1.9.1: EOFError for bytes behind the end, EOFError for half a file; gzip: BadGzipFile, EOFError
# Fails if isal tells the two apart.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet isal==1.9.1
cd "$folder"
env/bin/python - <<'PYTHON'
import gzip
import io
from importlib.metadata import version

from isal import igzip


def error(module, content):
    try:
        module.GzipFile(fileobj=io.BytesIO(content)).read()
        return "nothing"
    except Exception as raised:
        return type(raised).__name__


whole = gzip.compress(b'{"traceEvents": []}' * 100)
more, half = whole + b"uploaded\n", whole[: len(whole) // 2]
seen = [error(module, content) for module in (igzip, gzip) for content in (more, half)]
assert seen == ["EOFError", "EOFError", "BadGzipFile", "EOFError"], seen
print(
    f"isal {version('isal')}: {seen[0]} for bytes behind the end, {seen[1]} for half a file; "
    f"gzip: {seen[2]}, {seen[3]}"
)
PYTHON
