"""Writes the tables of settings, and quoted files, into the pages: ``python docs/make_tables.py``.

A page says what belongs between two comments, and this script puts it there as plain Markdown,
which every reader renders::

    <!-- table: verl_profiling.settings.schedule:Schedule schedule. -->
    <!-- file: ../tests/tools/example_tool.py python -->
    <!-- results: hooks -->
    <!-- ratios: results.json -->
    <!-- rows: verl_profiling.steps.kinds:PATTERNS -->
    <!-- faults: watch_faults.json -->
    <!-- compatibility: compatibility.json -->
    <!-- end -->

A table lists the fields of a dataclass: name (after the prefix), type, default, and the meaning
that its docstring gives. Results are a table of ``benchmarks/results.json``, with where it was
measured; ratios are those of its rows that are published. Rows are a tuple of named tuples, one
column per field. Faults are what ``make watch-faults``, ``make watch-judge``, ``make hang-judge``,
``make what-if-judge`` or ``make work-judge`` found, with a table of their own, or that of the
function named after the file. Compatibility is what ``make test-newest`` and ``make test-releases``
found. With
``--check`` nothing is written, and the exit code is 1 when a page is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from verl_profiling.typed_values import Size
from verl_profiling.units import byte_size

DOCS = Path(__file__).parent
KINDS = "table|file|results|ratios|rows|faults|compatibility"
BLOCK = re.compile(rf"(<!-- ({KINDS}): (\S+) ?(\S*) -->\n).*?(<!-- end -->)", re.DOTALL)
ATTRIBUTE = re.compile(r"^    (\w+): (.*)$")
TYPE_NAMES = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Size: "size",
    type(None): "`null`",
}
RANKS = frozenset({int, str, tuple[int, ...], type(None)})


def load(location: str) -> type:
    """Return the class at ``package.module:Class``."""
    module, _, name = location.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def meanings(cls: type) -> dict[str, str]:
    """Return what the docstrings of a dataclass and its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        _, _, section = (inspect.cleandoc(base.__doc__ or "")).partition("Attributes:\n")
        name = ""
        for line in section.splitlines():
            if match := ATTRIBUTE.match(line):
                name, found[match[1]] = match[1], match[2]
            elif name and line.startswith("        "):
                found[name] += f" {line.strip()}"
    return {name: as_markdown(text) for name, text in found.items()}


def as_markdown(text: str) -> str:
    """Return reStructuredText of a docstring as Markdown that stays inside a table's cell."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    for python, yaml in (
        ("``", "`"),
        ("`None`", "`null`"),
        ("`True`", "`true`"),
        ("`False`", "`false`"),
    ):
        text = text.replace(python, yaml)
    return text.replace("|", r"\|")


def type_name(kind: Any) -> str:
    """Return a type in the words of somebody who writes YAML."""
    if kind in TYPE_NAMES:
        return TYPE_NAMES[kind]
    if dataclasses.is_dataclass(kind):
        return "group"
    options = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return ", ".join(f"`{option}`" for option in options)
    if origin is tuple:
        return f"list of {type_name(options[0])}"
    if origin is dict:
        return "mapping"
    if origin in (typing.Union, types.UnionType):
        if frozenset(options) == RANKS:
            return "ranks"
        return " or ".join(type_name(option) for option in options if option is not type(None))
    raise TypeError(f"no name for {kind}")


def default_of(field: dataclasses.Field[Any], kind: Any) -> str:
    """Return a field's default as YAML has it; empty for a group, whose fields have their own."""
    factory = field.default_factory
    if factory is not dataclasses.MISSING:
        return "" if dataclasses.is_dataclass(factory) else f"`{json.dumps(factory())}`"
    if kind is Size:
        return f"`{byte_size(field.default).replace(' ', '')}`"
    if isinstance(field.default, tuple):
        return f"`[{', '.join(map(str, field.default))}]`"
    return f"`{field.default if isinstance(field.default, str) else json.dumps(field.default)}`"


def table(location: str, prefix: str) -> str:
    """Return the table of a dataclass.

    Raises:
        KeyError: Its docstring does not explain a field.
    """
    cls = load(location)
    explained, kinds = meanings(cls), typing.get_type_hints(cls)
    inherited = {
        field.name
        for base in cls.__bases__
        if base is not object
        for field in dataclasses.fields(base)
    }
    rows = [
        f"| `{prefix}{field.name}` | {type_name(kinds[field.name])} "
        f"| {default_of(field, kinds[field.name])} "
        f"| {explained[field.name]} |"
        for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in inherited)
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def quoted(page: Path, path: str, language: str) -> str:
    """Return a file as a code block."""
    return f"```{language}\n{(page.parent / path).read_text().rstrip()}\n```"


def measured(name: str) -> str:
    """Return a table of the benchmarks' results,
    or for ``results.json`` the ratios that are published.
    """
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    results = import_module("results")
    tables = json.loads(results.RESULTS.read_text())
    found: str = (
        results.ratios(tables) if name == "results.json" else results.markdown(tables[name])
    )
    return found


def faults(name: str, table: str) -> str:
    """Return what was noticed of faults in running loops, or another table of it."""
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    path = DOCS.parent / "benchmarks" / name
    found: str = getattr(import_module(path.stem), table)(json.loads(path.read_text()))
    return found


def compatible(name: str) -> str:
    """Return the table of the releases that were tested."""
    sys.path.insert(0, str(DOCS.parent))
    found: str = import_module("tests.compatibility").markdown(
        json.loads((DOCS / name).read_text())
    )
    return found


def listed(location: str) -> str:
    """Return the table of a tuple of named tuples."""
    module, _, name = location.partition(":")
    rows = getattr(import_module(module), name)
    lines = [f"| {' | '.join(row)} |" for row in (rows[0]._fields, *map(cells, rows))]
    return "\n".join([lines[0], "|---" * len(rows[0]._fields) + "|", *lines[1:]])


def cells(row: Any) -> Iterator[str]:
    """Yield the cells of a named tuple: names and patterns as code."""
    for field, value in row._asdict().items():
        if isinstance(value, tuple):
            yield ", ".join(f"`{name}`" for name in value)
        elif field in ("pattern", "example"):
            yield f"`{value}`".replace("|", r"\|")
        else:
            yield str(value)


def tables_in(page: Path) -> Iterator[str]:
    """Yield the locations of the dataclasses that a page has tables of."""
    for _, kind, what, _, _ in BLOCK.findall(page.read_text()):
        if kind == "table":
            yield what


def filled(page: Path) -> str:
    """Return a page with what belongs between its comments."""

    def fill(match: re.Match[str]) -> str:
        begin, kind, what, extra, end = match.groups()
        content = {
            "table": lambda: table(what, extra),
            "file": lambda: quoted(page, what, extra),
            "results": lambda: measured(what),
            "ratios": lambda: measured(what),
            "rows": lambda: listed(what),
            "compatibility": lambda: compatible(what),
            "faults": lambda: faults(what, extra or "markdown"),
        }[kind]()
        return f"{begin}\n{content}\n\n{end}"

    return BLOCK.sub(fill, page.read_text())


def main() -> int:
    """Write the pages, or only say which are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a page is out of date"
    )
    check = parser.parse_args().check
    pages = [*sorted(DOCS.glob("*.md")), DOCS.parent / "benchmarks" / "README.md"]
    stale = [page for page in pages if filled(page) != page.read_text()]
    for page in stale:
        if check:
            print(f"{page.parent.name}/{page.name} is out of date; run: make tables")
        else:
            page.write_text(filled(page))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
