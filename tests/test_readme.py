"""What the documentation tells a reader to type works as it is written there."""

from __future__ import annotations

import configparser
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from reader import RUNNABLE, SHARED, TRAIN, Reader, assignments

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "recipes/grpo_tiny/README.md", "docs/quickstart.md")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a language in all pages, with the page's name."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page, block) for page in PAGES for block in pattern.findall((ROOT / page).read_text())]


def shell_lines() -> list[list[str]]:
    """Return the words of every command in the shell blocks, continued lines joined,
    `$PWD` filled in.
    """
    text = "\n".join(block for _, block in blocks("bash"))
    lines = text.replace("\\\n", " ").replace("$PWD", str(ROOT)).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def commands(*programs: str) -> list[list[str]]:
    """Return the command lines that call one of the programs, each once, in order."""
    lines = [list(words) for words in dict.fromkeys(map(tuple, shell_lines()))]
    return [words for words in lines if words[len(assignments(words))] in programs]


def command_id(words: list[str]) -> str:
    return " ".join(words[len(assignments(words)) :])


def engine_marks(words: list[str]) -> list[pytest.MarkDecorator]:
    """Return the mark of the engine that a command needs, if it needs one."""
    return [
        getattr(pytest.mark, word.partition("=")[2])
        for word in words
        if word.startswith("rollout.engine=")
    ]


@pytest.mark.recipes
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=engine_marks(words)) for words in commands(*RUNNABLE)],
    ids=command_id,
)
def test_command_runs(words: list[str], reader: Reader) -> None:
    """Each command exits with 0, in the order of the pages."""
    done = reader.type(words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_commands_that_are_shared_are_on_the_pages() -> None:
    """The tests of the recipe look at what they leave. The demo comes first, and needs no clone;
    the first one of the recipe finds a folder that was empty.
    """
    typed = [tuple(words) for words in commands(*RUNNABLE)]
    assert typed[0] == ("verl-profiling", "demo")
    assert typed[3] == SHARED["e2e", "transformers"]
    assert {TRAIN, *SHARED.values()} <= set(typed)


@pytest.mark.parametrize("words", commands("make"), ids=command_id)
def test_make_target_exists(words: list[str]) -> None:
    """Each `make` command names a target that the Makefile has."""
    done = subprocess.run(
        [*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", commands("pip"), ids=command_id)
def test_extras_exist(words: list[str]) -> None:
    """Each `pip install` asks for extras that the package has."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    asked = re.findall(r"\[(.*?)\]", " ".join(words))
    assert set(",".join(asked).split(",")) - {""} <= set(setup["options.extras_require"])


def test_every_extra_is_in_the_table() -> None:
    """The README's table of extras has each one that a user may install, and no other."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    _, _, section = (ROOT / "README.md").read_text().partition("## Install")
    rows = re.findall(r"^\| (`.*?) \|", section.partition("\n## ")[0], re.MULTILINE)
    named = {extra for row in rows for extra in re.findall(r"`(\w+)`", row)}
    assert named == set(setup["options.extras_require"]) - {"test", "docs", "dev"}


def test_every_command_is_checked() -> None:
    """No shell block holds a program that the tests above pass over."""
    assert len(commands(*RUNNABLE, "make", "pip")) == len({tuple(words) for words in shell_lines()})


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_snippets_compile(page: str, block: str) -> None:
    compile(block, page, "exec")
