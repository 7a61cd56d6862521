"""The wheel and the source distribution, each installed into an empty environment:
``make test-package``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from step_folders import WORKERS, build_step

import verl_profiling

pytestmark = [pytest.mark.package, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verl_profiling"
PLUGIN = "verl_profiling/integrations/hydra_plugin/"
"""Where the files are in the repository that are installed in Hydra's namespace package."""
SUFFIXES = {"wheel": ".whl", "sdist": ".tar.gz"}
# Asked of an installed package, in its own environment.
FACTS = """
import importlib.metadata, json
from importlib.resources import files
import verl_profiling

[plugin] = importlib.metadata.entry_points(group="verl.plugins", name="verl_profiling")
print(json.dumps({
    "module": verl_profiling.__file__,
    "version": importlib.metadata.version("verl-profiling"),
    "plugin": plugin.load().__name__,
    "settings": files("verl_profiling.conf.profiling").joinpath("default.yaml").read_text(),
    "files": sorted(str(file) for file in importlib.metadata.files("verl-profiling")),
    "packages": sorted(one.name.lower() for one in importlib.metadata.distributions()),
}))
"""

APPLICATION = """
import hydra

@hydra.main(config_path="conf", config_name="main", version_base=None)
def main(config):
    print(config.profiling.mode)

main()
"""
OTHER_PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin

class Other(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        print("other")
"""


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Run a command as a user would, with nothing on the path but what is installed;
    return its output.
    """
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": os.environ["HOME"],
        "LC_ALL": "C.UTF-8",
        **_pip_settings(),
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _pip_settings() -> dict[str, str]:
    """Return where this machine's pip takes packages from."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def installed(path: str) -> str:
    """Return where a file of the repository is installed."""
    return path.replace(PLUGIN, "hydra_plugins/")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What ``python -m build`` makes of the files that are here."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True
    )
    return {kind: path for kind, suffix in SUFFIXES.items() for path in folder.glob(f"*{suffix}")}


@pytest.fixture(scope="module", params=SUFFIXES)
def bin_folder(
    request: pytest.FixtureRequest,
    distributions: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The commands of an environment that holds one of them, and nothing else."""
    folder = tmp_path_factory.mktemp(f"empty-{request.param}")
    run([sys.executable, "-m", "venv", folder / "env"], folder)
    run([folder / "env/bin/pip", "install", "-q", distributions[request.param]], folder)
    return folder / "env" / "bin"


def test_an_empty_environment_gets_the_package_and_no_framework(
    bin_folder: Path, tmp_path: Path
) -> None:
    """Modules, data files, plugin and version are there;
    neither tests nor recipes are, nor torch.
    """
    facts = json.loads(run([bin_folder / "python", "-c", FACTS], tmp_path))
    assert Path(facts["module"]).is_relative_to(bin_folder.parent)
    assert facts["version"] == verl_profiling.__version__
    assert facts["plugin"] == "verl_profiling.integrations.verl"
    assert facts["settings"] == (PACKAGE / "conf/profiling/default.yaml").read_text()
    expected = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    expected = {installed(path) for path in expected if not path.endswith((".pyc", ".pyo"))}
    assert set(facts["files"]) >= expected
    tops = {path.partition("/")[0] for path in facts["files"]}
    metadata = f"verl_profiling-{verl_profiling.__version__}.dist-info"
    assert tops == {"verl_profiling", "hydra_plugins", metadata, ".."}
    assert "hydra_plugins/__init__.py" not in facts["files"]  # it is everybody's
    assert not {"torch", "ray", "verl", "vllm", "sglang"} & set(facts["packages"])


def test_its_commands_read_a_step(bin_folder: Path, tmp_path: Path) -> None:
    """From ``--help`` to a page that carries its style and its script,
    of a step that was recorded.
    """
    command = bin_folder / "verl-profiling"
    step = build_step(tmp_path / "run")
    assert "usage: verl-profiling" in run([command, "--help"], tmp_path)
    assert run([command, "--version"], tmp_path) == f"verl-profiling {verl_profiling.__version__}\n"
    for subcommand in ("check", "merge"):
        run([command, subcommand, step], tmp_path)
    assert (step / "timeline.json.gz").stat().st_size > 0
    report = json.loads(run([command, "report", step, "--json"], tmp_path))
    assert set(WORKERS) <= set(json.dumps(report).replace('"', " ").split())
    run([command, "report", step, "--save"], tmp_path)
    page = (step / "report.html").read_text()
    for name in ("page.css", "picture.js", "d3.min.js"):
        assert (PACKAGE / "report" / "page" / name).read_text().strip()[:200] in page


def test_the_source_distribution_holds_what_tests_and_docs_need(
    distributions: dict[str, Path],
) -> None:
    """All that is under version control, so that a packager can build, test and read it."""
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "setup.cfg",
    ):
        assert name in names
    folders = ("benchmarks", "docs", "recipes", "requirements", "tests", "verl_profiling")
    done = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=False
    )
    listed = (
        done.stdout.split()
        if done.returncode == 0
        else ["tests/conftest.py", "tests/data/README.md"]
    )
    assert [name for name in listed if (ROOT / name).exists() and name not in names] == []
    assert not [name for name in names if "__pycache__" in name or "node_modules" in name]


def test_a_hydra_application_finds_the_group_without_a_search_path(
    bin_folder: Path, tmp_path: Path
) -> None:
    """Installed from either file, beside another plugin."""
    run([bin_folder / "pip", "install", "-q", "hydra-core"], tmp_path)
    assert_finds_the_group(bin_folder, tmp_path)


def test_an_editable_install_finds_the_group_too(
    distributions: dict[str, Path], tmp_path: Path
) -> None:
    """As a checkout is installed for development."""
    with tarfile.open(distributions["sdist"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    run([sys.executable, "-m", "venv", "env"], tmp_path)
    pip = tmp_path / "env/bin/pip"
    run([pip, "install", "-q", "hydra-core", "-e", *tmp_path.glob("verl_profiling-*")], tmp_path)
    assert_finds_the_group(pip.parent, tmp_path)


def assert_finds_the_group(bin_folder: Path, folder: Path) -> None:
    """Run an application; its own group of that name comes first."""
    [packages] = bin_folder.parent.glob("lib/python*/site-packages")
    (packages / "hydra_plugins" / "other").mkdir(parents=True)
    (packages / "hydra_plugins/other/__init__.py").write_text(OTHER_PLUGIN)
    (folder / "conf" / "profiling").mkdir(parents=True)
    (folder / "conf/main.yaml").write_text("{}")
    (folder / "conf/profiling/off.yaml").write_text("mode: own")
    (folder / "train.py").write_text(APPLICATION)
    for chosen, mode in (("e2e", "e2e"), ("discrete", "discrete"), ("off", "own")):
        found = run([bin_folder / "python", "train.py", f"+profiling={chosen}"], folder)
        assert found.split() == ["other", mode]
