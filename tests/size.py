"""Size and density of the package: ``python -m tests.size``; exits 1 above a ceiling of
``pyproject.toml``.

Tokens are counted without comments, docstrings and line ends, so packing lines changes nothing.
A branch is an ``if``, ``for``, ``while``, ``except``, conditional expression, ``case``, each
``and``/``or``, and each ``for`` and ``if`` of a comprehension. Nested expressions are conditional
expressions, comprehensions and ``:=``.
"""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import threading
import time
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType

import tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "verl_profiling"
LARGE_TOKENS = 3_000  # a module above it was found to hold two subjects
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SINGLE_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case),
)
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def prose_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings, and of other strings that stand alone."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def tokens_of(source: str, tree: ast.Module) -> int:
    """Return the number of code tokens of a module."""
    prose = prose_lines(tree)
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_prose = token.type == tokenize.STRING and token.start[0] in prose
        if token.type not in LAYOUT and not is_prose:
            count += 1
    return count


def branches_of(function: ast.AST) -> int:
    """Return the number of branches of a function, including functions inside it."""
    count = 0
    for node in ast.walk(function):
        if isinstance(node, SINGLE_BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def measured() -> tuple[dict[str, int], list[str]]:
    """Return tokens by wing with the figures of the package,
    and the functions with most branches.
    """
    wings: Counter[str] = Counter()
    figures: Counter[str] = Counter()
    functions: list[tuple[int, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        inside = path.relative_to(PACKAGE)
        tokens = tokens_of(source, tree)
        wing = inside.parts[0] if len(inside.parts) > 1 else "root"
        wings[wing] += tokens
        figures["tokens"] += tokens
        figures["modules"] += 1
        figures["modules at the root"] += wing == "root"
        figures["modules over 3,000 tokens"] += tokens > LARGE_TOKENS
        for node in ast.walk(tree):
            figures["nested"] += isinstance(node, (*COMPREHENSIONS, ast.IfExp, ast.NamedExpr))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                branches = branches_of(node)
                figures["functions over 15 branches"] += branches > 15
                figures["functions over 20 branches"] += branches > 20
                functions.append((branches, f"{inside}:{node.name} {branches}"))
    # In hundredths, as ceilings are integers.
    figures["nested expressions per 100,000 tokens"] = (
        100_000 * figures.pop("nested") // figures["tokens"]
    )
    most = [name for _, name in sorted(functions, reverse=True)[:8]]
    return {**wings, **figures}, most


def tokens_of_tests() -> int:
    """Return the number of code tokens of the tests."""
    sources = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]
    return sum(tokens_of(source, ast.parse(source)) for source in sources)


class EnteredModules:
    """The modules of the package that any thread enters while :attr:`is_noting` is set.

    Threads are profiled from their start, so the profiler is set before the callback makes any.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.is_noting = False

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        """Note the module of a call (a profile function of ``sys.setprofile``)."""
        path = frame.f_code.co_filename
        if self.is_noting and event == "call" and path.startswith(str(PACKAGE)):
            self.paths.add(path)


def loop_modules(settings: dict[str, object], noted_steps: range) -> int:
    """Return how many modules some steps of a loop with one local worker enter,
    on all its threads.
    """
    from verl_profiling import ProfilingCallback, stage
    from verl_profiling.workers import CaptureMixin

    entered = EnteredModules()
    threading.setprofile(entered.note)
    sys.setprofile(entered.note)
    with tempfile.TemporaryDirectory() as folder:
        config = {"enable": True, "tool": "spans", "save_path": folder, **settings}
        worker, callback = CaptureMixin(), ProfilingCallback(config)
        worker.init_capture(config, role="actor")
        callback.add_workers("actor", worker)
        callback.on_train_begin()
        for number in range(1, noted_steps.stop + 1):
            # The step after the last one is noted too: what the last one left is looked at in it.
            entered.is_noting = number >= noted_steps.start
            callback.on_step_begin(number)
            with stage("update_actor"):
                time.sleep(0.2)  # the watch's thread judges a step while the next one runs
            if number < noted_steps.stop:
                callback.on_step_end()
        entered.is_noting = False
        callback.on_train_end()
    sys.setprofile(None)
    threading.setprofile(None)  # new threads are profiled no more
    return len(entered.paths)


def entered_modules() -> dict[str, int]:
    """Return how many modules one captured step enters, and five steps that are only watched."""
    watched = {"schedule": {"steps": []}, "watch": {"enable": True}}
    return {
        "modules of a captured step": loop_modules({"schedule": {"steps": [2]}}, range(2, 3)),
        "modules of five watched steps": loop_modules(watched, range(2, 7)),
    }


def main() -> int:
    """Print the table; return 1 if something is above its ceiling."""
    ceilings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    figures, most_branches = measured()
    figures = {**figures, "tokens of the tests": tokens_of_tests(), **entered_modules()}
    over = [name for name, size in figures.items() if size > ceilings.get(name, 0)]
    for name, size in figures.items():
        mark = "  TOO LARGE" if name in over else ""
        print(f"{size:>8,}  {name}  (at most {ceilings.get(name, 0):,}){mark}")
    print("most branches:", ", ".join(most_branches))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
