"""The sentences of the package and its pages."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG_WORDS = 25
LONG_SHARE = 0.03
# Words of ours for which the field has one: see docs/concepts.md.
BANNED = re.compile(r"\b(account of|an account|hears|patience|uncaptured)\b")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, text


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of what is logged or raised; a value counts as one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.match(
            r"(logger\.)|(\w*Error$)", ast.unparse(node.func)
        ):
            for value in node.args:
                parts = value.values if isinstance(value, ast.JoinedStr) else [value]
                text = [
                    str(part.value) if isinstance(part, ast.Constant) else "X"
                    for part in parts
                    if isinstance(part, (ast.Constant, ast.FormattedValue))
                ]
                yield node.lineno, "".join(text)


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of the paragraphs and list items of a Markdown page."""
    page = re.sub(r"(?s)```.*?```|<!--.*?-->", lambda match: "\n" * match[0].count("\n"), page)
    for match in re.finditer(r"(?:^(?![|#:(]|\s*$).*\n?)+", page, re.MULTILINE):
        yield page.count("\n", 0, match.start()) + 1, match[0]


def sentences(text: str) -> list[str]:
    """Split prose; code in backticks is one word, an item of a list is a sentence of its own."""
    prose = re.sub(r"`+[^`]*`+", "X", text)
    parts = re.split(r"(?<=[.!?:;])\s|\n\s*\n|\n\s*(?:[-*]|\d+\.|\w+:)\s", prose)
    return [" ".join(part.split()) for part in parts if len(part.split()) > 1]


def main() -> int:
    """Print what breaks a limit; return 1 if something does."""
    files = [
        *sorted((ROOT / "verl_profiling").rglob("*.py")),
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    count, long, wrong = 0, [], []
    for path in files:
        if path.suffix == ".md":
            texts = list(paragraphs(path.read_text()))
        else:
            tree = ast.parse(path.read_text())
            texts = [*docstrings(tree), *messages(tree)]
            wrong += [
                f"{path.relative_to(ROOT)}:{line}: begins with What"
                for line, text in texts
                if text.startswith("What ")
            ]
        for line, text in texts:
            place = f"{path.relative_to(ROOT)}:{line}"
            wrong += [f"{place}: {word}" for word in BANNED.findall(" ".join(text.split()))]
            for sentence in sentences(text):
                count += 1
                if len(sentence.split()) > LONG_WORDS:
                    long.append(f"{place}: {sentence}")
    print(*wrong, sep="\n")
    share = len(long) / count
    print(
        f"{count:,} sentences, {share:.1%} over {LONG_WORDS} words (at most {LONG_SHARE:.0%}); "
        f"{len(wrong)} wrong words"
    )
    if share > LONG_SHARE:
        print(*long, sep="\n")
    return 1 if wrong or share > LONG_SHARE else 0


if __name__ == "__main__":
    sys.exit(main())
