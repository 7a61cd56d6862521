"""Reads what processes wrote in a hang: files in ``hangs/``, and of an ended hang in a folder of
its step there.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl_profiling.files.opener import UNDECODABLE, names_in, read_small

HANGS = "hangs"
"""Name of the folder in that of a run."""

_MOST_FILES = 64  # a page with the stacks of a thousand ranks says no more, and is large


class HangStacks(msgspec.Struct, frozen=True):
    """The stacks of a process in a hang.

    Attributes:
        lane: The process.
        code: The innermost line of user code.
        threads: Stack of each thread, innermost frame first.
        tasks: Stack of each asyncio task, outermost frame first.
    """

    lane: str
    code: str = ""
    threads: dict[str, list[str]] = {}
    tasks: dict[str, list[str]] = {}


def ended_hang(step: int) -> str:
    """Return the name of the folder, in ``hangs/``, of the hang of a step that went on."""
    return f"step_{step:06d}"


def read_stacks(folder: Path, sentence: str = "") -> list[HangStacks]:
    """Return the stacks of the processes of a hang; unreadable files are left out.

    Args:
        folder: ``hangs/`` or a folder in it.
        sentence: A sentence on the hang; the process for which the others wait comes first.
    """
    stacks: dict[str, HangStacks] = {}
    try:
        names = [name for name in names_in(folder) if name.endswith(".json")]
        names.sort(key=lambda name: (f"waits for {name[:-5]}," not in sentence, name))
        for name in names[:_MOST_FILES]:
            state = msgspec.json.decode(read_small(folder / name), type=HangStacks)
            stacks[state.lane] = state
    except (OSError, *UNDECODABLE):  # they go away when the step goes on
        pass
    return [*stacks.values()]
