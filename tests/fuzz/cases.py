"""One case: a changed input, a command, and what has to hold whatever the input."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import shutil
import traceback
import warnings
import zlib
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.fuzz.inputs import INPUTS
from verl_profiling.analysis import open_run
from verl_profiling.cli import main
from verl_profiling.errors import ProfilingError

__all__ = ["Case", "Verdict", "random_case", "run_case"]


class Case(NamedTuple):
    input: str
    command: str
    data: bytes


class Verdict(NamedTuple):
    kind: str
    detail: str = ""


def random_case(seed: int, whole: Path) -> Case:
    """Return the case of a seed, the same on every machine."""
    random = Random(seed)
    name = list(INPUTS)[seed % len(INPUTS)]
    given = INPUTS[name]
    command = random.choice(given.commands)
    return Case(name, command, given.change((whole / given.target).read_bytes(), random))


def run_case(case: Case, whole: Path, folder: Path) -> Verdict:
    shutil.copytree(whole, folder)
    given = INPUTS[case.input]
    (folder / given.target).write_bytes(case.data)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = _run(case.command, folder / given.path, folder)
    except BaseException:
        return Verdict("crash", traceback.format_exc()[-1500:])
    if code not in (0, 1, 2):
        return Verdict("crash", f"exit code {code}")
    if case.command == "check" and code == 0 and (why := _not_ok(folder, case.input)):
        return Verdict("wrong ok", why)
    if case.command == "merge" and code != 2:
        return _of_timelines(folder)
    return Verdict("fine")


def _run(command: str, path: Path, folder: Path) -> int:
    if command == "analysis":
        return _use_api(path)
    second = {"diff": [str(folder / "whole.json")]}.get(command, [])
    name, options = {
        "merge": ("merge", ["-j", "1"]),
        "report": ("report", ["--save"]),
        "top": ("top", ["--once"]),
    }.get(command, (command, []))
    return main([name, str(path), *second, *options])


def _use_api(path: Path) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for step in open_run(path).steps():
                step.report()
                step.lanes()
                step.merge(min_us=1.0)
        except ProfilingError:
            return 2
    return 0


def _not_ok(folder: Path, name: str) -> str:
    """Return why a folder is not whole that ``check`` called ok."""
    given = INPUTS[name]
    if "trace" not in name:
        return ""
    path = folder / given.target
    try:
        text = _unpacked(path.read_bytes()).decode("utf-8-sig", "replace")
        # Bytes behind a whole document are no damage: all of its events are there.
        content, _ = json.JSONDecoder().raw_decode(text.lstrip())
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        return f"not whole: {error}"
    events = content if isinstance(content, list) else content.get("traceEvents")
    if not isinstance(events, list):
        return "it has no events"
    return next((f"no event: {event!r:.200}" for event in events if not _is_event(event)), "")


def _unpacked(data: bytes) -> bytes:
    content = b"" if data[:2] == b"\x1f\x8b" else data
    while data[:2] == b"\x1f\x8b":  # as gzip(1), which ignores bytes behind the last member
        member = zlib.decompressobj(wbits=31)
        content += member.decompress(data)
        if not member.eof:
            raise EOFError("a member is cut off")
        data = member.unused_data
    return content


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        return False
    return event["ph"] != "X" or (_is_number(event.get("ts")) and _is_number(event.get("dur", 0)))


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _of_timelines(folder: Path) -> Verdict:
    """Say whether all timelines that were written are JSON."""
    for path in folder.rglob("timeline*.json.gz"):
        try:
            json.loads(gzip.decompress(path.read_bytes()), parse_constant=_refuse)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            return Verdict("bad output", f"{path.name}: {error}")
    return Verdict("fine")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
