"""Mistakes of users: each is said once, at once, with its key and what to do."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import disk_of

from verl_profiling import (
    AsyncProfilingCallback,
    ConfigError,
    ProfilingCallback,
    ProfilingConfig,
    span,
    stage,
)
from verl_profiling.capture.session import Session
from verl_profiling.errors import CaptureStateError
from verl_profiling.workers import CaptureMixin

NAMES = ("update_actor", "update_critic", "old_log_prob", "reward", "values", "embed")


class Worker(CaptureMixin):
    def __init__(self, settings: dict[str, Any], role: str) -> None:
        self.init_capture(settings, role=role, rank=0, world_size=1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("seed", range(24))
def test_a_worker_that_contradicts_the_callback_is_logged_once(
    seed: int, tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Another role, other settings, a selected stage that nothing marks;
    and nothing is said without one.
    """
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, 6), 3))
    marked, absent = (f"{name}_{seed}" for name in chance.sample(NAMES, 2))
    role, other = chance.sample(("actor", "critic", "judge"), 2)
    mistakes = {mistake for mistake in ("role", "settings", "stage") if chance.random() < 0.5}
    config: dict[str, Any] = {
        "enable": True,
        "tool": "spans",
        "mode": chance.choice(("e2e", "discrete")),
        "schedule": {"steps": steps},
        "save_path": str(tmp_path / "run"),
        "select": {"stages": [marked, *([absent] if "stage" in mistakes else [])]},
    }
    of_worker = dict(config)
    if "settings" in mistakes:
        of_worker["mode"] = "e2e" if config["mode"] == "discrete" else "discrete"
    worker = Worker(of_worker, role)
    with ProfilingCallback(config) as profiling:
        profiling.add_workers(other if "role" in mistakes else role, [worker])
        for step in range(1, 7):
            profiling.on_step_begin(step)
            with stage(marked):
                pass
            profiling.on_step_end()
    said = warnings(caplog)
    expected = {
        "role": f"was added as {other!r}",
        "settings": "pass the same settings to init_capture",
        "stage": f"select.stages: nothing marked the stage {absent!r}",
    }
    for mistake, text in expected.items():
        assert sum(text in message for message in said) == (mistake in mistakes), (mistake, said)
    assert len(said) == len(mistakes)


@pytest.mark.parametrize("seed", range(12))
def test_a_correct_loop_is_told_nothing(
    seed: int, tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages of other steps than the captured ones, roles without workers,
    and roles that share a process.
    """
    chance = random.Random(seed)
    roles = chance.sample(("actor", "critic", "judge", "reward"), 3)
    late, often = (f"{name}_{seed}" for name in chance.sample(NAMES, 2))
    config = {
        "enable": True,
        "tool": "spans",
        "schedule": {"steps": sorted(chance.sample(range(1, 6), 3))},
        "save_path": str(tmp_path / "run"),
        "select": {"stages": [late, often]},
        "roles": {roles[0]: {"stages": [late]}, roles[2]: {"enable": False, "stages": ["never"]}},
    }
    workers = {role: Worker(config, role) for role in roles}
    with ProfilingCallback(config) as profiling:
        for role in chance.sample(roles, 3):
            profiling.add_workers(role, [workers[role]])
        for step in range(1, 8):
            profiling.on_step_begin(step)
            for name in (often, late) if step > 5 else (often,):
                with stage(name):
                    pass
            profiling.on_step_end()
    assert warnings(caplog) == []


@pytest.mark.parametrize("deep", [1, 3])
def test_a_folder_that_cannot_be_written_is_tried_when_the_callback_is_made(
    deep: int, tmp_path: Path
) -> None:
    """A good one is not left behind."""
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    good, *bad = (
        tmp_path.joinpath(name, *"abc"[:deep]) for name in ("new", "file", "circle", "n" * 300)
    )
    ProfilingCallback({"enable": True, "save_path": str(good)})
    assert not (tmp_path / "new").exists()
    for given in map(str, bad):
        with pytest.raises(
            ConfigError, match=r"save_path: .* cannot be written \(.*choose another folder"
        ):
            ProfilingCallback({"enable": True, "save_path": given})
        ProfilingCallback({"enable": False, "save_path": given})


def test_ranks_try_a_new_folder_at_once(tmp_path: Path) -> None:
    """None gets in another's way, however they come."""
    draw, ranks = random.Random(0), 8
    together = threading.Barrier(ranks)

    def make(folder: Path) -> None:
        together.wait()
        ProfilingCallback({"enable": True, "tool": "spans", "save_path": str(folder)})

    with ThreadPoolExecutor(ranks) as pool:
        for start in range(100):
            folder = tmp_path.joinpath(str(start), *"abc"[: draw.randint(0, 3)])
            list(pool.map(make, [folder] * ranks))
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_full_at_the_start_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps are captured once there is room."""
    with disk_of("256k,nr_inodes=16", tmp_path / "disk") as disk:
        run = disk / "run"
        config: dict[str, Any] = {
            "enable": True,
            "tool": "spans",
            "save_path": str(run),
            "schedule": {"steps": [1, 3]},
        }
        config["limits"] = {"min_free_bytes": 0}
        with suppress(OSError):
            for number in itertools.count():
                (disk / f"{number}").touch()
        with ProfilingCallback(config) as profiling:
            assert "free its disk" in caplog.text
            for step in range(1, 4):
                profiling.on_step_begin(step)
                profiling.on_step_end()
                for path in disk.glob("[0-9]*"):
                    path.unlink()
        assert [path.name for path in run.glob("step_*")] == ["step_000003"]


@pytest.mark.parametrize("order", ["apart", "nested", "died", "again"])
def test_two_callbacks_in_one_step_are_logged_once(
    order: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One after the other is no mistake, also where the first loop died in a step
    and runs again.
    """
    config = {"enable": True, "schedule": {"steps": [9]}, "save_path": str(tmp_path)}
    first, second = ProfilingCallback(config), ProfilingCallback(config)
    first.on_step_begin(1)
    if order == "apart":
        first.on_step_end()
    for step in (1, 2):
        second.on_step_begin(step)
        second.on_step_end()
    for step in {"nested": (2,), "again": (2, 3)}.get(order, ()):
        if order == "nested":
            first.on_step_end()
        first.on_step_begin(step)
        first.on_step_end()
    second.on_train_end()
    first.on_train_end()
    shared = sum("call the hooks of one callback only" in message for message in warnings(caplog))
    assert shared == (order == "nested")


async def test_with_and_async_with_are_told_apart(tmp_path: Path) -> None:
    config = {"enable": True, "save_path": str(tmp_path)}
    with (
        pytest.raises(CaptureStateError, match="write `async with`"),
        AsyncProfilingCallback(config),
    ):
        pass


def test_cycles_before_the_first_step_are_said_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that resumes at step 500 has no cycle left."""
    cycles = {"skip_first": 10, "wait": 2, "active": 1, "repeat": 4}
    with ProfilingCallback(
        {"enable": True, "schedule": cycles, "save_path": str(tmp_path)}
    ) as profiling:
        profiling.on_step_begin(500)
        assert "begins with step 500, and the schedule ends with step 22" in warnings(caplog)[0]
        profiling.on_step_end()


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"schedule": {"steps": "2-3"}}, r"schedule\.steps: .*write a list: \[2, 3\]"),
        ({"schedule": {"steps": "2-9"}}, r"schedule\.steps: .*write a list: \[2, 3, \.\.\., 9\]"),
        ({"select": {"ranks": "one_per_node"}}, r"select\.ranks: .*0,8-15\", or one_per_pp_stage"),
        ({"run_id": 12}, 'run_id: .*quotation marks: "12"'),
    ],
)
def test_a_setting_of_another_form_has_a_remedy_that_works(
    given: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        ProfilingConfig.from_any({"enable": True, **given})


def test_the_request_of_a_span_may_be_its_second_argument() -> None:
    assert span("generate", "r5") is span("generate", request="r5")


class Forgetful(CaptureMixin):
    def train(self) -> None:
        with stage("update_actor"):
            pass


@pytest.mark.parametrize("mistake", ["", "forgotten", "switched off", "watch off"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_worker_that_the_watch_cannot_read_is_one_warning(
    mistake: str, ranks: int, tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """``init_capture`` was forgotten, or got other settings: no capture would say so."""
    config: dict[str, Any] = {
        "enable": True,
        "schedule": {"steps": []},
        "watch": {"enable": True, "trigger": {}},
        "save_path": str(tmp_path / "run"),
    }
    given = {
        "": config,
        "switched off": {**config, "enable": False},
        "watch off": {**config, "schedule": {"steps": [9]}, "watch": {"enable": False}},
    }
    workers = [Forgetful() for _ in range(ranks)]
    for rank, worker in enumerate(workers):
        if mistake != "forgotten":
            worker.init_capture(given[mistake], role="actor", rank=rank, world_size=ranks)
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", workers)
        for step in range(1, 5):
            profiling.on_step_begin(step)
            for worker in workers:
                worker.train()
            profiling.on_step_end()
    said = warnings(caplog)
    remedies = {
        "forgotten": "Forgetful is not set up; call init_capture(config, role=..., rank=...) first",
        "switched off": "pass the same settings as the callback's",
        "watch off": "pass the same settings as the callback's",
    }
    assert len(said) == bool(mistake), said
    assert remedies.get(mistake, "") in "".join(said)
    assert not mistake or "actor" in said[0]
