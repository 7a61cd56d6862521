"""The pages under docs/: what is generated is up to date, and they read on GitHub as well as on the site."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_profiling import ProfilingConfig
from verl_profiling.settings.tool_names import load_tool
from verl_profiling.tools import TOOLS

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "make_tables.py"
# The pages that only the site can show: the API reference, and the contents.
FOR_THE_SITE = {"api.md", "index.md"}
PAGES = sorted(ROOT.glob("docs/*.md"))


@pytest.fixture(scope="module")
def make_tables() -> types.ModuleType:
    """The script that writes the tables, as a module."""
    spec = importlib.util.spec_from_file_location("make_tables", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def groups(cls: type) -> Iterator[type]:
    """Yield a dataclass of settings and those that its fields hold."""
    yield cls
    for kind in typing.get_type_hints(cls).values():
        for option in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(option):
                yield from groups(typing.cast("type", option))


def test_tables_are_up_to_date() -> None:
    """The pages hold what the settings' dataclasses and the quoted files say now."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_is_in_a_table(make_tables: types.ModuleType) -> None:
    """All groups of the settings, and the options of every tool, have their tables."""
    options = [load_tool(name).options_class for name in TOOLS]
    expected = {group for cls in (ProfilingConfig, *options) for group in groups(cls)}
    shown = {make_tables.load(location) for page in PAGES for location in make_tables.tables_in(page)}
    assert expected <= shown


def test_a_setting_without_a_meaning_is_refused(
    make_tables: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that the docstring leaves out ends the script; it does not make an empty cell."""
    options: Any = dataclasses.make_dataclass("Options", [("speed", int, 3)])
    monkeypatch.setattr(make_tables, "load", lambda location: options)
    with pytest.raises(KeyError, match="speed"):
        make_tables.table("anywhere:Options", "")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in FOR_THE_SITE], ids=lambda page: page.name
)
def test_page_reads_on_github(page: Path) -> None:
    """No page but those for the site uses what GitHub shows as source: directives, roles, bare links."""
    found = re.findall(
        r"^```\{.*|\{[\w:]+\}`[^`]*`|\[\]\(.*?\)|^\([\w-]+\)=$", page.read_text(), re.MULTILINE
    )
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture of a page names a file, and every anchor a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, target
