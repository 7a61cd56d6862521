"""The README's table of what was verified is the one that the suites make."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.verification import CELLS, outcomes, table

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_in_the_readme_is_the_current_one() -> None:
    """A cell that is added, or verified in another way, has to be changed there too."""
    assert table() in (ROOT / "README.md").read_text()


def test_every_test_that_a_cell_names_exists() -> None:
    for test in filter(None, (test for _, *tests in CELLS.values() for test in tests)):
        place, _, name = test.partition("::")
        parts = [part for part in place.split(".") if not part.startswith("Test")]
        module = ROOT.joinpath(*parts).with_suffix(".py")
        sources = [module, *module.parent.glob("contract.py")]  # engines inherit theirs from there
        trees = [ast.parse(source.read_text()) for source in sources]
        names = {getattr(node, "name", "") for tree in trees for node in ast.walk(tree)}
        assert {name.partition("[")[0], *place.split(".")[len(parts) :]} <= names, test


def test_a_test_that_failed_shows(tmp_path: Path) -> None:
    """A failure is not covered up by another suite that passed, and a skipped test did not run."""
    _, test, _ = next(cell for (tool, _), cell in CELLS.items() if tool == "nsys")
    place, _, name = test.partition("::")
    paths = []
    for inside in ("<failure/>", "", "<skipped/>"):
        paths.append(tmp_path / f"{len(paths)}.xml")
        case = f'<testcase classname="{place}" name="{name}">{inside}</testcase>'
        paths[-1].write_text(f"<testsuite>{case}</testsuite>")
    assert "FAILED" in table(outcomes(paths))
    assert outcomes(paths[2:]) == {}
