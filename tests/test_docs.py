"""The pages under docs/: what is generated is up to date,
and they read on GitHub as well as on the site.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib.util
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import verl_profiling
from verl_profiling import ProfilingCallback, ProfilingConfig, stage
from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_manifest
from verl_profiling.numbers import report_columns
from verl_profiling.numbers.idle_causes import CAUSES
from verl_profiling.report import model
from verl_profiling.report.findings import FINDINGS
from verl_profiling.settings.roles import load_tool
from verl_profiling.tools import TOOLS
from verl_profiling.tools.base import NoOptions
from verl_profiling.workers import CaptureMixin

ROOT = Path(__file__).parents[1]
PACKAGE = Path(verl_profiling.__file__).parent
SCRIPT = ROOT / "docs" / "make_tables.py"
# The pages that only the site can show: the API reference, and the contents.
FOR_THE_SITE = {"api.md", "index.md"}
PAGES = sorted(ROOT.glob("docs/*.md"))
LINKING = [*PAGES, ROOT / "README.md", *sorted(ROOT.glob("recipes/*/README.md"))]


def groups(cls: type) -> Iterator[type]:
    """Yield a dataclass of settings and those that its fields hold."""
    yield cls
    for kind in typing.get_type_hints(cls).values():
        for option in (kind, *typing.get_args(kind)):
            if dataclasses.is_dataclass(option):
                yield from groups(typing.cast("type", option))


def test_tables_are_up_to_date() -> None:
    """All groups of the settings and the options of every tool have theirs."""
    spec = importlib.util.spec_from_file_location("make_tables", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    make_tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_tables)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    options = [cls for name in TOOLS if (cls := load_tool(name).options_class) is not NoOptions]
    expected = {group for cls in (ProfilingConfig, *options) for group in groups(cls)}
    shown = {
        make_tables.load(location) for page in PAGES for location in make_tables.tables_in(page)
    }
    assert expected <= shown


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in FOR_THE_SITE], ids=lambda page: page.name
)
def test_page_reads_on_github(page: Path) -> None:
    """No page but those for the site uses what GitHub shows as source: directives, roles,
    bare links.
    """
    found = re.findall(
        r"^```\{.*|\{[\w:]+\}`[^`]*`|\[\]\(.*?\)|^\([\w-]+\)=$", page.read_text(), re.MULTILINE
    )
    assert found == []


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture of a page names a file, and every anchor a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            assert anchor in slugs, target


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@stage("update_actor")
def update(*batches: object) -> float:
    """Stand for a worker's work in the examples."""
    return 0.5


def test_callback_page_names_every_method() -> None:
    page = (ROOT / "docs" / "callback.md").read_text()
    public = {name for name in dir(ProfilingCallback) if not name.startswith("_")} - {"sink"}
    assert {name for name in public if name not in page} == set()


@pytest.mark.parametrize("page", ["README.md", "docs/callback.md"])
def test_the_first_loop_of_a_page_runs(page: str, tmp_path: Path, session: Session) -> None:
    """Typed as it stands, with workers and a step of one's own, it captures the step."""
    settings = {
        "enable": True,
        "tool": "spans",
        "save_path": str(tmp_path),
        "schedule": {"steps": [2]},
    }
    actor, server = CaptureMixin(), CaptureMixin()
    actor.init_capture(settings, role="actor")
    server.init_capture(settings, role="rollout")
    names = {
        "ProfilingCallback": ProfilingCallback,
        "config": SimpleNamespace(profiling=settings),
        "actors": [actor],
        "servers": [server],
        "prompts": [],
        "steps": 3,
        "rollout": lambda servers, prompts: [],
        "update": update,
        "train_step": lambda actors, servers: {"loss": update()},
    }
    exec(compile(python_blocks(page)[0], page, "exec"), names)
    manifest = read_manifest(next(tmp_path.rglob("step_*")))
    assert (manifest.complete, manifest.metrics) == (True, {"loss": 0.5})
    assert [worker.roles for worker in manifest.workers] == [["actor", "rollout"]]
    stages = ["rollout", "update_actor"] if page == "docs/callback.md" else []
    assert [span.name for span in manifest.stages] == stages


def test_notebook_cell_of_the_callback_page_runs(tmp_path: Path, session: Session) -> None:
    """Compiled like a cell and awaited on a running event loop, it captures the worker's stage."""
    [cell] = [
        block for block in python_blocks("docs/callback.md") if block.startswith("async with")
    ]
    config = {"enable": True, "tool": "spans", "save_path": str(tmp_path)}
    worker = CaptureMixin()
    worker.init_capture(config, role="actor")
    names = {
        "AsyncProfilingCallback": verl_profiling.AsyncProfilingCallback,
        "config": config,
        "worker": worker,
        "batch": None,
    }
    worker.update = update  # type: ignore[attr-defined]
    asyncio.run(eval(compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names))
    manifest = read_manifest(next(tmp_path.rglob("step_*")))
    assert [span.name for span in manifest.workers[0].stages] == ["update_actor"]


def test_landing_page_shows_what_the_readme_shows() -> None:
    """The same loop, which a test of the README runs;
    and every page has a place in the contents.
    """
    landing = (ROOT / "docs" / "index.md").read_text()
    loop = re.findall(
        r"^```python\n.*?^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )[0]
    assert loop in landing
    listed = set(re.findall(r"^([\w-]+)$", landing, re.MULTILINE))
    assert listed == {page.stem for page in PAGES} - {"index"}


def test_where_a_change_goes_names_what_there_is() -> None:
    """Each place in the table exists, and each module and folder at the root
    of the package has one.
    """
    _, _, section = (ROOT / "docs" / "extending.md").read_text().partition("## Where a change goes")
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    places = {PACKAGE / place for row in rows for place in re.findall(r"`([\w./]+)`", row)}
    files = {place if place.exists() else place.with_suffix(".py") for place in places}
    assert {place for place in files if not place.exists()} == set()
    rooms = {
        path
        for path in PACKAGE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - files <= {PACKAGE / "__init__.py", PACKAGE / "conf"}
    _, _, changes = section.partition("### Files of a change")
    named = set(re.findall(r"(?<![\w*-])[\w./-]+\.(?:py|yaml|css|md|cfg)\b(?!\*)", changes))
    roots = (PACKAGE, ROOT, *(ROOT / "tests" / "integrations", ROOT / "requirements"))
    absent = {name for name in named if not any((root / name).exists() for root in roots)}
    assert {name for name in absent if "NAME" not in name} == set()


STRUCTS = [
    found
    for module in (model, report_columns)
    for found in vars(module).values()
    if isinstance(found, type)
    and issubclass(found, msgspec.Struct)
    and found.__module__ == module.__name__
]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_documented(struct: type[msgspec.Struct]) -> None:
    """The page of the schema is made of these docstrings; times carry their unit in the name."""
    documented = " ".join(
        each.__doc__ for each in struct.__mro__ if issubclass(each, msgspec.Struct)
    )
    for field in msgspec.structs.fields(struct):
        assert re.search(rf"\b{field.name}\b", documented), field.name


def test_every_cause_and_threshold_is_stated() -> None:
    """In the documentation of the report."""
    page = (ROOT / "docs" / "report.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page.partition("## Lost time")[2], re.MULTILINE)
    assert tuple(rows[: len(CAUSES)]) == CAUSES
    findings = page.partition("## Findings")[2]
    for rule, share in FINDINGS.items():
        (row,) = re.findall(rf"^\| `{rule}` \| (.*) \|$", findings, re.MULTILINE)
        assert f"{share:.0%}" in row
