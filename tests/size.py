"""The size of the package: ``python -m tests.size``; exits 1 above a ceiling of ``pyproject.toml``."""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

import tomllib

PACKAGE = Path(__file__).parents[1] / "verl_profiling"
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str, tree: ast.Module) -> int:
    """Return the number of code lines of a module."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def measured() -> dict[str, int]:
    """Return code lines by wing, and of all: code lines, modules, classes, modules with one importer."""
    wings: Counter[str] = Counter()
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    modules = classes = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        inside = path.relative_to(PACKAGE)
        lines = code_lines(source, tree)
        wings[inside.parts[0] if len(inside.parts) > 1 else "root"] += lines
        wings["all"] += lines
        modules += 1
        for node in ast.walk(tree):
            classes += isinstance(node, ast.ClassDef)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE.name):
                importers[str(node.module)].add(path)
    single = sum(len(by) == 1 for by in importers.values())
    return {**wings, "modules": modules, "classes": classes, "modules with one importer": single}


def passed() -> dict[str, int]:
    """Return how many modules and functions of the package one captured step of a local worker passes."""
    from verl_profiling import ProfilingCallback, stage
    from verl_profiling.workers import CaptureMixin

    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    with tempfile.TemporaryDirectory() as folder:
        config = {"enable": True, "tool": "spans", "save_path": folder, "schedule": {"steps": [2]}}
        worker, callback = CaptureMixin(), ProfilingCallback(config)
        worker.init_capture(config, role="actor")
        callback.add_workers("actor", worker)
        callback.on_train_begin()
        for step in (1, 2, 3):
            sys.setprofile(note if step > 1 else None)
            callback.on_step_begin(step)
            if step == 3:
                break
            with stage("update_actor"):
                pass
            callback.on_step_end()
        sys.setprofile(None)
        callback.on_train_end()
    return {"modules of a captured step": len({module for module, _ in seen}), "its functions": len(seen)}


def main() -> int:
    """Print the table; return 1 if something is above its ceiling."""
    ceilings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["size"]
    found = {**measured(), **passed()}
    over = [name for name, size in found.items() if size > ceilings.get(name, 0)]
    for name, size in found.items():
        mark = "  TOO LARGE" if name in over else ""
        print(f"{size:>7,}  {name}  (at most {ceilings.get(name, 0):,}){mark}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
