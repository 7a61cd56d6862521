"""The wheel and the source distribution, each installed into an empty environment:
``make test-package``.
"""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from step_folders import WORKERS, build_step

import verl_profiling

pytestmark = [pytest.mark.package, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verl_profiling"
EPOCH = {"SOURCE_DATE_EPOCH": "1790000000"}
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

USES = {
    "analysis": """
from verl_profiling.analysis import open_step
print(len(open_step(STEP).to_frame("workers")), "rows")
""",
    "view": """
from verl_profiling.commands.view import bundled_ui
print(bundled_ui().name)
""",
    "remote": """
import fsspec
from verl_profiling import ProfilingCallback
from verl_profiling.workers import CaptureMixin
settings = {"enable": True, "tool": "spans", "save_path": "memory://run", "strict": True}
worker = CaptureMixin()
worker.init_capture(settings, role="actor")
with ProfilingCallback(settings) as profiling:
    profiling.add_workers("actor", worker)
    profiling.on_step_begin(1)
    profiling.on_step_end()
print(fsspec.filesystem("memory").find("/run/step_000001"))
""",
    "tensorboard": """
from verl_profiling.cli import main
assert main(["report", STEP, "--tensorboard", "."]) == 0
""",
    "otel": """
import http.server, threading
from verl_profiling.cli import main

class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1/traces"
assert main(["export", STEP, "--otlp", url]) == 0
""",
}
"""Programs that need an extra, and use it on a step."""
PRINTS = {
    "analysis": r"\d+ rows",
    "view": "web_dist",
    "remote": r"actor_rank0\.result\.json",
    "tensorboard": "step 12",
    "otel": "spans sent",
}
HEAVY = ("recipes", "vllm", "sglang", "verl", "megatron", "nsys", "npu", "precision")


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


def build(source: Path, folder: Path) -> dict[str, Path]:
    """Return what ``python -m build`` makes of a folder."""
    command = [sys.executable, "-m", "build", "--outdir", folder, source]
    done = subprocess.run(
        command, env={**os.environ, **EPOCH}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {kind: path for kind, suffix in SUFFIXES.items() for path in folder.glob(f"*{suffix}")}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is built of the files that are here."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture
def empty_bin(tmp_path: Path) -> Path:
    """The commands of an environment with nothing but pip."""
    run([sys.executable, "-m", "venv", tmp_path / "env"], tmp_path)
    return tmp_path / "env" / "bin"


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


def test_equal_sources_give_equal_bytes(distributions: dict[str, Path], tmp_path: Path) -> None:
    """Built again in another folder, from the source distribution itself."""
    with tarfile.open(distributions["sdist"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [source] = tmp_path.glob("verl_profiling-*")
    again = build(source, tmp_path / "again")
    for kind, path in distributions.items():
        assert again[kind].read_bytes() == path.read_bytes(), kind


def test_the_metadata_is_fit_for_an_index(distributions: dict[str, Path]) -> None:
    """An index accepts both files; on the index's page no picture and no link lead into the
    repository, and nothing else of the README is missing.
    """
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = str(metadata.get_payload(decode=True), "utf-8")
    assert re.findall(r"\]\((?!https?://)", page) == []
    readme = (ROOT / "README.md").read_text()
    headings = re.compile(r"^#+ .*", re.MULTILINE)
    assert headings.findall(page) == headings.findall(readme)
    assert page.count("\n|") == readme.count("\n|")
    pytest.importorskip("twine", reason="twine is not installed; `make env` builds an environment")
    command = [sys.executable, "-m", "twine", "check", "--strict", *distributions.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("extra", USES)
def test_an_extra_brings_what_its_feature_needs(
    extra: str, distributions: dict[str, Path], empty_bin: Path, tmp_path: Path
) -> None:
    """In an environment that was empty."""
    step = build_step(tmp_path / "run")
    wheel = str(distributions["wheel"])
    program = f"STEP = {str(step)!r}\n{USES[extra]}"
    run([empty_bin / "pip", "install", "-q", f"{wheel}[{extra}]"], tmp_path)
    assert re.search(PRINTS[extra], run([empty_bin / "python", "-c", program], tmp_path))


def test_the_heavy_extras_can_be_had(
    distributions: dict[str, Path], empty_bin: Path, tmp_path: Path
) -> None:
    """Nothing is installed. Of `train`, all versions fit together; of the others, the packages
    that they name exist.
    """
    dry = [empty_bin / "pip", "install", "--dry-run"]
    printed = run([*dry, f"{distributions['wheel']}[train]"], tmp_path)
    assert {"torch", "ray", "verl-profiling"} <= would_install(printed)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extra in HEAVY:
        named = setup["options.extras_require"][extra].split()
        packages = {re.split("[>[]", requirement)[0] for requirement in named}
        assert packages <= would_install(run([*dry, "--no-deps", *named], tmp_path)), extra


def would_install(printed: str) -> set[str]:
    """Return the names of the packages that a dry run of pip lists."""
    listed = printed.partition("Would install ")[2].split()
    return {name.rpartition("-")[0].replace("torch-npu", "torch_npu") for name in listed}


def test_the_demo_runs_from_the_wheel(
    distributions: dict[str, Path], empty_bin: Path, tmp_path: Path
) -> None:
    """Beside the torch that is installed here, without a clone."""
    torch = pytest.importorskip("torch", reason="torch is not installed; `make env` installs it")
    run([empty_bin / "pip", "install", "-q", distributions["wheel"]], tmp_path)
    [packages] = empty_bin.parent.glob("lib/python*/site-packages")
    # comes after the environment's own packages
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    printed = run([empty_bin / "verl-profiling", "demo"], tmp_path)
    assert printed.startswith("step 20, ")
    assert (tmp_path / "outputs/grpo_demo/step_000020/report.html").exists()
