"""Changes of bytes and of JSON, made from a random generator alone."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

__all__ = ["garble_bytes", "garble_json"]

_TOKENS = (
    *(
        b"1e999999999",
        b"-1",
        b"NaN",
        b"-Infinity",
        b"9" * 40,
        b"1e308",
        b"null",
        b"true",
        b'"',
        b"\\",
    ),
    *(b"{", b"}", b"[", b"]", b",", b":", b"},{", b"]}", b"\x00", b"\xff", b"\x1b[31m", b"../../x"),
    *(
        b'"traceEvents":[',
        b'"baseTimeNanoseconds":',
        b'"ts":',
        b'"dur":-5',
        b'"ph":"M"',
        b"\\ud800",
    ),
    *("\u202e".encode(), b"[" * 3000),
)
_DEEP = "deep deep deep"
_LONE = "half a pair"
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        2**31,
        2**53,
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        10**40,
        10**400,
    ),
    *(0.5, -0.0, 1e-320, 1e18, 1e308, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        "x",
        "nan",
        "1e999",
        "-3",
        ".",
        "..",
        "../../outside",
        "/etc/passwd",
        "a/b",
        "\0",
        "\x1b[2J",
    ),
    *(
        "\u202e",
        "x" * 5000,
        "9" * 5000,
        _DEEP,
        _LONE,
        [],
        {},
        [[]],
        [None],
        {"": None},
        {"a": {"b": []}},
    ),
)
_CHANGES = ("replace", "replace", "replace", "remove", "double")


def garble_bytes(data: bytes, random: Random) -> bytes:
    """Return a content with a few places cut, doubled, overwritten or inserted."""
    for _ in range(random.choice((1, 1, 2, 5))):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice((0, 1, 2, 8, 64, len(data))))
        taken = data[start:end]
        drawn = random.randbytes(len(taken)), random.choice(_TOKENS)
        middle = random.choice((b"", *drawn, 2 * taken, taken[::-1]))
        data = data[:start] + middle + data[end:]
    return data


def garble_json(data: bytes, random: Random, within: tuple[str, ...] = ()) -> bytes:
    """Return a document with a few values replaced, removed, doubled or renamed."""
    document = {"": json.loads(data)}
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        container, key = _place(document, random, within)
        _change(container, key, random)
    text = json.dumps(document.get(""))
    text = text.replace(f'"{_DEEP}"', "[" * 3000 + "]" * 3000).replace(_LONE, "\\ud800")
    return text.encode()


def _place(document: dict[str, Any], random: Random, within: tuple[str, ...]) -> tuple[Any, Any]:
    """Return a container and a key in it, each as likely on every level."""
    container: Any = document
    key: Any = ""
    wanted = list(within)
    while True:
        inner = container[key] if key in container or isinstance(container, list) else None
        if (
            not isinstance(inner, dict | list)
            or not inner
            or (not wanted and random.random() < 0.25)
        ):
            return container, key
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        container, key = inner, random.choice(keys)
        if wanted and isinstance(inner, dict) and wanted[0] in inner:
            key = wanted.pop(0)


def _change(container: Any, key: Any, random: Random) -> None:
    change = random.choice(_CHANGES)
    if isinstance(container, dict) and key not in container:  # an earlier change has removed it
        return
    if change == "replace":
        container[key] = deepcopy(random.choice(_VALUES))
    elif change == "remove":
        del container[key]
    elif isinstance(container, list):
        container.insert(key, deepcopy(container[key]))
    else:
        container[random.choice((key, f"{key}x", "name", "path"))] = deepcopy(container[key])
