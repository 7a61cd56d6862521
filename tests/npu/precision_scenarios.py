"""Captures with the real msprobe, run by ``test_precision.py``:
it wraps torch for a process's whole life.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.session import process_session
from verl_profiling.testing import record_step
from verl_profiling.tools.precision import watch_model
from verl_profiling.workers import CaptureMixin

Outcome = dict[str, Any]


def settings(mode: str = "e2e", **options: Any) -> Outcome:
    return {"enable": True, "tool": "precision", "mode": mode, "tools": {"precision": options}}


def train(model: torch.nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(torch.ones(2, 4)).sum().backward()


def entries(folder: Path) -> list[str]:
    """Return the names in the only dump of a folder."""
    [dump] = folder.rglob("dump.json")
    return list(json.loads(dump.read_text())["data"])


def refused(folder: Path, config: Outcome) -> str:
    try:
        with record_step(config, folder):
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def calls(root: Path) -> Outcome:
    """Whatever a process does with the default options, one after the other."""
    linear = torch.nn.functional.linear
    model = torch.nn.Linear(4, 4)
    found: Outcome = {"steps": steps(root / "run", model)}
    found["restored"] = torch.nn.functional.linear is linear

    raised = ""
    with record_step(settings("discrete"), root / "raises") as recorded:
        try:
            with stage("update_actor"):
                train(model)
                model(torch.ones(3, 3))
        except RuntimeError as error:
            raised = str(error)
        with stage("update_critic"):
            train(model)
    found["raises"] = {
        "raised": raised,
        "result": recorded.result,
        "entries": entries_of(recorded.folder),
    }

    (root / "file").write_text("")
    found["unwritable"] = refused(root / "file" / "step", settings())
    found["unfit"] = refused(root / "a=b", settings())
    found["off_after_a_failure"] = torch.nn.functional.linear is linear

    with record_step(settings(), root / "full") as recorded:
        block_dump(recorded.folder)
        train(model)
    found["full"] = recorded.result
    with record_step(settings(), root / "idle") as recorded:
        pass
    found["idle"] = recorded.result
    found["other_options"] = refused(root / "other", settings(only=["linear"]))
    found["open"] = process_session().sink is not None
    return found


def block_dump(folder: Path) -> None:
    """Put something in the way of what msprobe writes, as a full disk is."""
    [dump] = folder.rglob("dump.json")
    dump.unlink()
    dump.mkdir()


def steps(root: Path, model: torch.nn.Module) -> Outcome:
    """Two steps of a loop: how often torch was called in each is in the dumps of each."""
    config = {**settings(), "save_path": str(root), "schedule": {"steps": [2, 4]}}
    callback = ProfilingCallback(config)
    worker = CaptureMixin()
    worker.init_capture(config, role="actor", rank=3)
    callback.add_workers("actor", worker)
    callback.on_train_begin()
    for step in range(1, 6):
        callback.on_step_begin(step)
        with stage("update_actor"):
            train(model, times=step)
        callback.on_step_end()
    callback.on_train_end()
    return {folder.name: entries_of(folder) for folder in sorted(root.glob("step_*"))}


def entries_of(folder: Path) -> dict[str, list[str]]:
    """Return the names in each dump, by its path in the step folder."""
    return {
        str(dump.parent.relative_to(folder)): list(json.loads(dump.read_text())["data"])
        for dump in sorted(folder.rglob("dump.json"))
    }


def modules(root: Path) -> Outcome:
    """Modules and calls of the model that the worker names."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    unknown = refused(root / "unknown", settings(level="mix"))
    watch_model(model)
    with record_step(settings(level="mix"), root / "known") as recorded:
        train(model)
    return {"unknown": unknown, "result": recorded.result, "entries": entries(recorded.folder)}


def structure(root: Path) -> Outcome:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    watch_model(model)
    with record_step(settings(task="structure", level="L0"), root / "some") as recorded:
        train(model)
    with record_step(settings(task="structure", level="L0"), root / "none") as idle:
        pass
    [construct] = recorded.folder.rglob("construct.json")
    return {
        "result": recorded.result,
        "modules": json.loads(construct.read_text()),
        "idle": idle.result,
    }


def tensors(root: Path) -> Outcome:
    options = {"task": "tensor", "only": ["linear"]}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with record_step(settings(**options), root / "step") as recorded:
        train(model)
    [dump] = recorded.folder.rglob("dump.json")
    where = Path(json.loads(dump.read_text())["dump_data_dir"])
    values = {path.name: torch.load(path).shape for path in sorted(where.glob("*.pt"))}
    return {"result": recorded.result, "entries": entries(recorded.folder), "values": values}


def own_debugger(root: Path) -> Outcome:
    from msprobe.pytorch import PrecisionDebugger

    PrecisionDebugger(dump_path=str(root / "own"))
    message = refused(root / "ours", settings())
    PrecisionDebugger.start()
    train(torch.nn.Linear(4, 4))
    PrecisionDebugger.stop()
    return {"message": message, "own": entries(root / "own")}


if __name__ == "__main__":
    scenarios: dict[str, Callable[[Path], Outcome]] = {
        scenario.__name__: scenario
        for scenario in (calls, modules, structure, tensors, own_debugger)
    }
    print(msgspec.json.encode(scenarios[sys.argv[1]](Path(sys.argv[2]))).decode())
