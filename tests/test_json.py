"""``--json``: each command prints the document that its text is made of, and nothing else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from drawn_summaries import summary
from step_folders import build_step, rewrite
from test_top import write_run

from verl_profiling.cli import COMMANDS, EXIT_BAD_INPUT, EXIT_FINDING, EXIT_OK, main
from verl_profiling.manifest import NsysRange, StageSpan
from verl_profiling.watch.log_writer import WatchLog

COMMANDS_PAGE = Path(__file__).parents[1] / "docs" / "commands.md"


class Printed(NamedTuple):
    """The output of a command, as text and as JSON."""

    text: str
    documents: list[dict[str, Any]]
    errors: str
    code: int


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a command without and with ``--json``; it warns and exits alike."""

    def run(*command: str) -> Printed:
        capsys.readouterr()
        code = main(list(command))
        text = capsys.readouterr()
        assert main([*command, "--json"]) == code
        found = capsys.readouterr()
        documents = [json.loads(line) for line in found.out.splitlines()]
        assert all(isinstance(document, dict) for document in documents)
        return Printed(text.out, documents, found.err, code)

    return run


def drawn_run(folder: Path, chance: random.Random) -> list[int]:
    """Write a run with a watch log and captured steps of odd stage names; return their numbers."""
    write_run(folder, trigger={"slow_stage": 1.3, "window": 20})
    log = WatchLog(folder)
    steps = sorted(chance.sample(range(30), chance.randint(1, 2)))
    for number in range(30):
        log(summary(number, {"rollout": int(5000 * chance.lognormvariate(0, 0.25))}))
    for step in steps:
        manifest = build_step(folder, step=step)
        if chance.random() < 0.4:
            (manifest / "actor_rank1.torch.json.gz").unlink()
    return steps


@pytest.mark.parametrize("seed", range(8))
def test_documents_have_what_the_text_says(tmp_path: Path, printed: Any, seed: int) -> None:
    """Of a run with some steps, perhaps damaged: sizes, counts, sentences, states and notes."""
    chance = random.Random(seed)
    run = tmp_path / chance.choice(("run", "läuft", "a b"))
    steps = drawn_run(run, chance)

    top = printed("top", str(run))
    [view] = top.documents
    assert f"{len(steps)} capture" in top.text
    assert (view["captures"], list(view["latest"])) == (
        len(steps),
        [f"step_{step:06d}" for step in steps],
    )
    assert [step["step"] for step in view["watch"]] == list(range(30))
    [varying] = re.findall(r"detected only from rollout (\S+) times", top.text)
    assert f"{view['varying']['rollout']:.1f}" == varying

    report = printed("report", str(run))
    assert [document["step"] for document in report.documents] == steps
    assert all(f"step {step}\n" in report.text for step in steps)

    check = printed("check", str(run))
    [checked] = check.documents
    for artifact in checked["artifacts"]:
        assert re.search(rf"{artifact['status']} +{artifact['path']}", check.text)
    assert check.code == (EXIT_OK if checked["ok"] else EXIT_FINDING)

    merge = printed("merge", str(run), "--max-bytes", chance.choice(("100", "1M")))
    for document, line in zip(merge.documents, merge.text.splitlines(), strict=True):
        assert line.startswith(document["path"])
        assert f"{document['events']:,} events" in line
        assert all(f"warning: {problem}" in merge.errors for problem in document["problems"])
    assert [document["step"] for document in merge.documents] == steps
    assert merge.code == (EXIT_FINDING if merge.errors else EXIT_OK)

    what_if = printed("what-if", str(run), "--scale", f"update_actor={chance.choice((0.5, 2))}")
    for document in what_if.documents:
        assert f"{document['title']}: " in what_if.text
        assert document["changes"][0] in what_if.text

    diff = printed("diff", str(run), str(run), "--fail-above", "5")
    [compared] = diff.documents
    words = " ".join(diff.text.split())
    assert all(compared[sentence] in words for sentence in ("basis", "verdict"))
    assert {change["kind"] for change in compared["changes"]} >= {"step", "watch", "stage"}

    trigger = printed("trigger", str(run), "--roles", "actor", "--tools", "torch,spans")
    [answer] = trigger.documents
    assert answer["state"] == "pending"
    request = json.loads((run / "requests" / f"{answer['request']}.json").read_text())
    assert request["selection"] == {"tools": ["torch", "spans"], "roles": ["actor"]}


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_has_its_steps_and_roles(tmp_path: Path, printed: Any, seed: int) -> None:
    """In numbers, also where the text abbreviates; a plan without captures is a finding."""
    chance = random.Random(seed)
    every, last = chance.randint(1, 40), chance.randint(1, 400)
    ranks = sorted(chance.sample(range(64), 3))
    config = {
        "enable": chance.random() < 0.9,
        "mode": chance.choice(("e2e", "discrete")),
        "schedule": {"every": every},
        "roles": {"actor": {"ranks": ranks}},
        "watch": {"enable": True, "trigger": {"slow_stage": 1.5}},
    }
    path = tmp_path / "conf.json"
    path.write_text(json.dumps(config))
    plan = printed("plan", str(path), "--steps", str(last))
    [document] = plan.documents
    captures = [[step, step] for step in range(every, last + 1, every)] * config["enable"]
    assert document["captures"] == captures
    assert plan.code == (EXIT_OK if captures else EXIT_FINDING)
    assert all(f"  {key} = " in plan.text for key in document["settings"])
    if config["enable"]:
        actor, others = document["roles"]
        assert (actor["role"], actor["workers"]) == ("actor", {"ranks": ranks})
        assert (others["role"], others["workers"], others["mode"]) == ("", {}, config["mode"])
        assert all(f"{tool}: {files}" in plan.text for tool, files in actor["files"].items())
        assert all(f"{ratio:.1f} times" in plan.text for ratio in document["noticed_from"].values())


def test_other_documents(tmp_path: Path, printed: Any, capsys: Any) -> None:
    """The tools of the machine, and collected reports; a path need not be UTF-8."""
    doctor = printed("doctor")
    for part in doctor.documents[0]["machine"]:
        assert f"{part['subject']:<18}  {part['state']}\n" in doctor.text
    reports = tmp_path / "nsys"
    for folder in (reports, tmp_path / "step_000001"):
        folder.mkdir()
    (reports / "actor.7.1.nsys-rep").write_bytes(b"report")
    with (reports / "actor.7.ranges.jsonl").open("wb") as notes:
        for number, name in enumerate(("a.nsys-rep", "b.nsys-rep"), 1):
            noted = NsysRange(
                number=number, folder="step_000001", artifact=name, begin_ns=1, end_ns=2
            )
            notes.write(msgspec.json.encode(noted) + b"\n")
    collect = printed("collect", str(tmp_path))
    artifacts = collect.documents[0]["artifacts"]
    assert [(entry["path"], entry["status"]) for entry in artifacts] == [
        ("step_000001/a.nsys-rep", "ok"),
        ("step_000001/b.nsys-rep", "missing"),
    ]
    lines = (f"{entry['status']:<10}  {entry['path']}  {entry['reason']}" for entry in artifacts)
    assert collect.text.splitlines() == [line.rstrip() for line in lines]
    run = tmp_path / b"l\xe4uft".decode(errors="surrogateescape")
    write_run(run)
    assert main(["top", str(run), "--json"]) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["run"] == str(run)


def test_every_command_has_its_row_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """And the option in its help."""
    page = COMMANDS_PAGE.read_text().partition("## JSON")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--json" in capsys.readouterr().out


def test_names_are_comma_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeated or not; a comma of a name is escaped, also in what the predictions advise."""
    folder = build_step(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    begin, end = manifest["begin_ns"], manifest["end_ns"]
    stages = [StageSpan("roll,out", begin, begin + 1), StageSpan("reward", begin + 1, end)]
    rewrite(folder, stages=stages)
    parts = []
    for options in (
        ["--stages", "roll\\,out,reward"],
        ["--stages", "roll\\,out", "--stages", "reward"],
        ["--stages", "roll\\,out"],
    ):
        assert main(["merge", str(folder), *options, "--json"]) == EXIT_OK
        parts.append(json.loads(capsys.readouterr().out)["events"])
    assert parts[0] == parts[1] != parts[2]
    for scale in (["roll,out=0.5,reward=2"], ["roll,out=0.5", "reward=2"]):
        options = [word for item in scale for word in ("--scale", item)]
        assert main(["what-if", str(folder), *options, "--json"]) == EXIT_OK
        changes = json.loads(capsys.readouterr().out)["changes"]
        assert changes == ["--scale roll,out=0.5", "--scale reward=2"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["merge", "x", "--stage", "a"], "unknown argument --stage; did you mean '--stages'?"),
        (["trigger", "x", "--tool", "a"], "unknown argument --tool; did you mean '--tools'?"),
        (["what-if", "x", "--tool", "a=1s"], "unknown argument --tool; did you mean '--tools'?"),
        (["merge", "x", "--stages", "a,,b"], "'a,,b' is not a list of names such as A,B"),
        (["what-if", "x", "--scale", "a=1,b"], "'b' is not NAME=VALUE"),
        (["top", "x", "y"], "unknown argument y"),
    ],
)
def test_a_wrong_option_is_refused(
    capsys: pytest.CaptureFixture[str], command: list[str], words: str
) -> None:
    """With the spelling that is right; options are not abbreviated."""
    try:
        code = main(command)
    except SystemExit as left:
        code = left.code
    assert code == EXIT_BAD_INPUT
    assert words in capsys.readouterr().err
