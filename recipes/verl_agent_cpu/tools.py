"""Tools that take their time, each in its own way.
verl loads this file into every agent-loop worker.
"""

from __future__ import annotations

import asyncio
import time
from zlib import crc32

from verl.tools.function_tool import function_tool

_SLOW_SEARCH_S = 2.0


@function_tool
async def calculate(expression: str) -> str:
    """Calculate a sum.

    Args:
        expression: Numbers with plus signs between them.
    """
    await asyncio.sleep(0.02)
    return str(sum(int(number) for number in expression.split("+")))


@function_tool
async def search(query: str) -> str:
    """Search the web. One query in eight takes far longer than the others.

    Args:
        query: What to look for.
    """
    luck = crc32(query.encode()) % 8
    await asyncio.sleep(_SLOW_SEARCH_S if luck == 0 else 0.1 + 0.05 * luck)
    return f"no page about {query}"


@function_tool
async def parse(text: str) -> str:
    """Take a text apart. It is a coroutine that never awaits: the whole event loop waits for it.

    Args:
        text: The text.
    """
    time.sleep(0.15)
    return " ".join(reversed(text.split()))


@function_tool
def compile_code(code: str) -> str:
    """Compile code. A plain function, which verl runs on another thread.

    Args:
        code: The code.
    """
    time.sleep(0.2)
    return f"{len(code)} characters"
