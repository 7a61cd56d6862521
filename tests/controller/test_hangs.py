"""Steps that hang: said while they do, with the process that the others wait for."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import ray
from conftest import Pool
from fleet import Agents, Engine, Reborn
from test_callback import configured, set_up
from test_spmd_watch import run as run_ranks
from test_watch import after_a_while

from verl_profiling import ProfilingCallback, ProfilingConfig
from verl_profiling.cli import main
from verl_profiling.controller.hang_watch import report_to_rank_0
from verl_profiling.files.step_summary import Hang, RankUse, StepSummary
from verl_profiling.files.watch_log import WatchLogReader, latest_step
from verl_profiling.watch.process_sums import NO_LOOKS, StageSums, WatchQuestion

pytestmark = pytest.mark.timeout(180)

QUICK = {"enable": True, "every": 1, "hang_s": 1.0, "first_hang_s": 1.0}
Workers = tuple[str, Any]


def watched(tmp_path: Path, **watch: Any) -> ProfilingConfig:
    return configured(tmp_path, watch={**QUICK, **watch}, schedule={"steps": []})


def lines(config: ProfilingConfig) -> list[StepSummary]:
    return list(WatchLogReader(Path(config.save_path)).read())


def hangs(config: ProfilingConfig) -> list[Hang]:
    """Return the hangs that are logged of steps that have not ended."""
    return [line.hang for line in lines(config) if line.hang is not None and not line.end_ns]


@contextmanager
def loop(config: ProfilingConfig, *roles: Workers) -> Iterator[ProfilingCallback]:
    """Run some quick steps, then open step 4."""
    callback = ProfilingCallback(config)
    for role, workers in roles:
        callback.add_workers(role, workers)
    with callback:
        for step in range(1, 5):
            callback.on_step_begin(step)
            if step < 4:
                with callback.stage("update_actor"):
                    time.sleep(0.05)
                callback.on_step_end()
        yield callback
        callback.on_step_end()


def the_hang(config: ProfilingConfig) -> Hang:
    """Return the hang that is logged soon."""
    assert after_a_while(lambda: bool(hangs(config)), 30), lines(config)
    return hangs(config)[0]


def of_process(config: ProfilingConfig, lane: str) -> dict[str, Any]:
    """Return what a process has written of a hang."""
    return json.loads((Path(config.save_path) / "hangs" / f"{lane}.json").read_text())


@pytest.fixture(scope="module")
def process_of_agents(ray_cluster: None) -> Any:
    actor = ray.remote(num_cpus=0)(Agents).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
def agents(process_of_agents: Any, tmp_path: Path) -> Any:
    """An agent loop, which no call holds up after a test."""
    ray.get(process_of_agents.set_up.remote(watched(tmp_path)))
    yield process_of_agents
    (tmp_path / "switch").unlink(missing_ok=True)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_tool_that_never_returns_is_told_by_all_commands(
    tmp_path: Path,
    agents: Any,
    pool: Pool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    blocks: bool,
) -> None:
    """Which trajectory, in the log, top and check; with stacks in its own file;
    gone when it is over.
    """
    config, switch = watched(tmp_path), tmp_path / "switch"
    set_up(config, pool.sync[:1])
    with loop(config, ("agent_loop", [agents]), ("actor", pool.sync[:1])) as callback:
        switch.touch()
        with callback.stage("rollout"):
            call = agents.call_tool.remote(switch, blocks)
            hang = the_hang(config)
            assert (hang.stage, hang.lane) == ("rollout", "agent_loop_rank0")
            assert "tool:search of trajectory p7, sample 3" in hang.reason
            assert ("blocks its event loop" in hang.reason) == blocks
            assert [one.partition(" in ")[0] for one in hang.waiting] == ["controller"]
            state = of_process(config, "agent_loop_rank0")
            assert state["spans"][0]["facts"] == {"turn": "2"}
            stacks = state["threads" if blocks else "tasks"].values()
            assert any("call_tool" in frame for stack in stacks for frame in stack), stacks
            [said] = [text for text in caplog.messages if "step 4 hangs: in rollout" in text]
            assert "agent_loop_rank0" in said
            assert main(["top", config.save_path, "--once"]) == 1
            assert capsys.readouterr().out.startswith(
                "step 4 hangs: in rollout nothing has progressed for "
            )
            assert main(["check", config.save_path]) == 1
            assert "step 4 hangs: in rollout" in capsys.readouterr().out
            assert main(["report", config.save_path, "--save"]) == 0
            assert capsys.readouterr().out.startswith("step 4 hangs: in rollout")
            page = Path(config.save_path, "index.html")
            assert "Step 4 hangs</strong>" in page.read_text()
            assert "in call_tool" in page.read_text().partition('id="hangs"')[2]
            switch.unlink()
            ray.get(call)
    assert any("step 4 goes on" in text for text in caplog.messages)
    assert after_a_while(lambda: not list(Path(config.save_path, "hangs").glob("*.json")))
    assert main(["top", config.save_path, "--once"]) == 0
    assert main(["check", config.save_path]) == 0
    assert main(["report", config.save_path, "--save"]) == 0
    assert "step 4 hangs" not in capsys.readouterr().out + page.read_text()
    assert "Step 4 hung: in rollout nothing progressed for" in page.read_text()
    assert "in call_tool" in page.read_text().partition('id="hangs"')[2]
    assert lines(config)[-1].step == 4


def test_a_worker_that_sleeps_in_a_stage_is_waited_for(tmp_path: Path, pool: Pool) -> None:
    """It answers no call, and writes where it is; the other rank has answered."""
    config = watched(tmp_path)
    set_up(config, pool.sync[:2], switches=tmp_path)
    (tmp_path / "stage").touch()
    with loop(config, ("actor", pool.sync[:2])) as callback:
        with callback.stage("update_actor"):
            call = pool.sync[1].work.remote()
            hang = the_hang(config)
            (tmp_path / "stage").unlink()
            ray.get(call)
        assert after_a_while(lambda: not latest_step(lines(config))[0].hangs), (
            "it goes on, in the same step"
        )
        assert (hang.stage, hang.lane) == ("update_actor", "actor_rank1")
        assert "is in update_actor for" in hang.reason
        assert ".py:" in hang.reason, "where it is"
        assert 0.05 <= (hang.usual_s or 0) < 1
    of_step = [line for line in lines(config) if line.step == 4]
    assert [(bool(line.hang), bool(line.end_ns)) for line in of_step] == [
        *((True, False), (False, False), (True, True)),
    ]


def test_an_engine_with_a_request_explains_the_trajectory_that_waits_for_it(
    tmp_path: Path, agents: Any
) -> None:
    config = watched(tmp_path)
    engines = [ray.remote(num_cpus=0)(Engine).remote() for _ in range(2)]
    ray.get([engine.set_up.remote(config, number) for number, engine in enumerate(engines)])
    roles = ("rollout", engines), ("agent_loop", [agents])
    with loop(config, *roles) as callback, callback.stage("rollout"):
        call = agents.run.remote(engines, [0.01, 60])
        assert the_hang(config).lane == "rollout1_rank0"
        for engine in engines:
            ray.kill(engine)
        with pytest.raises(ray.exceptions.RayError):
            ray.get(call)


def test_an_engine_whose_own_process_is_stopped(tmp_path: Path) -> None:
    """Its server answers; the process is one that a process of the server has started."""
    config = watched(tmp_path)
    engine = ray.remote(num_cpus=0)(Engine).remote()
    ray.get(engine.set_up.remote(config, 0))
    pid = ray.get(engine.start_process.remote())
    with (
        loop(config, ("rollout", [engine])) as callback,
        callback.stage("rollout"),
        stopped(engine, pid),
    ):
        hang = the_hang(config)
    assert hang.lane == "rollout0_rank0"
    assert hang.reason == f"has a process that is stopped by a signal (sleep, pid {pid})"
    os.kill(pid, signal.SIGKILL)
    ray.kill(engine)


@contextmanager
def stopped(actor: Any, pid: int) -> Iterator[None]:
    """Stop a process by a signal, as a debugger does."""
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


@contextmanager
def killed(actor: Any, pid: int) -> Iterator[None]:
    ray.kill(actor)
    yield


@contextmanager
def held(actor: Any, pid: int) -> Iterator[None]:
    """Let native code keep the interpreter, so that no thread of the process runs."""
    actor.__ray_call__.remote(lambda worker: ctypes.PyDLL(None).sleep(60))
    yield
    ray.kill(actor)


@pytest.mark.parametrize(
    ("befalls", "reason"),
    [
        (stopped, "is stopped by a signal"),
        (killed, "is dead: "),
        (held, "answers nothing, and writes no file (pid "),
    ],
)
def test_a_worker_that_cannot_answer_is_told_apart(
    tmp_path: Path, pool: Pool, befalls: Callable[[Any, int], Any], reason: str
) -> None:
    """A process that is stopped, gone or busy in native code while its loop waits
    for something else.
    """
    config = watched(tmp_path)
    set_up(config, pool.sync[:1])
    actor = ray.remote(num_cpus=0)(Reborn).remote(config)
    pid = ray.get(actor.set_up.remote(config, "critic"))
    with loop(config, ("actor", pool.sync[:1]), ("critic", actor)), befalls(actor, pid):
        hang = the_hang(config)
    assert hang.lane == "critic_rank0"
    assert hang.reason.startswith(reason)
    with suppress(Exception):
        ray.kill(actor)


def test_a_pid_of_another_container_tells_nothing_here(tmp_path: Path, pool: Pool) -> None:
    """The worker is held, and the process with its pid in this container is stopped."""
    config = watched(tmp_path)
    set_up(config, pool.sync[:1])
    actor = ray.remote(num_cpus=0)(Reborn).remote(config)
    ray.get(actor.set_up.remote(config, "critic"))

    def move(worker: Reborn, pid: int) -> None:
        [(identity, _)] = worker._capture_roles.values()
        moved = msgspec.structs.replace(identity, pid=pid, namespace="pid:[1]")
        worker._capture_roles = {"critic": (moved, True)}

    with subprocess.Popen(["sleep", "100"]) as other:
        ray.get(actor.__ray_call__.remote(move, other.pid))
        other.send_signal(signal.SIGSTOP)
        with loop(config, ("actor", pool.sync[:1]), ("critic", actor)), held(actor, 0):
            hang = the_hang(config)
        other.kill()
    assert hang.lane == "critic_rank0"
    assert hang.reason.startswith(f"answers nothing, and writes no file (pid {other.pid} ")


def test_a_rank_that_has_not_entered_a_collective_is_waited_for(tmp_path: Path) -> None:
    """All ranks are in one stage, two of them in the collective."""
    logs = run_ranks(tmp_path, "hangs", all={"watch": {**QUICK, "first_hang_s": 5.0}})
    config = configured(tmp_path)
    found = hangs(config)
    assert [one.lane for one in found] == ["actor_rank2"], logs
    assert "has not entered the collective" in found[0].reason
    assert [one[:11] for one in found[0].waiting] == ["actor_rank0", "actor_rank1"]
    assert "step 8 goes on" in logs[0]


@pytest.mark.parametrize("stage", ["", "save_checkpoint"])
def test_the_loop_itself_is_told_by_its_line(tmp_path: Path, pool: Pool, stage: str) -> None:
    """No worker is in anything: it is the loop's own code."""
    config = watched(tmp_path)
    set_up(config, pool.sync[:1])
    found: list[Hang] = []
    waits = threading.Thread(target=lambda: found.append(the_hang(config)))

    def load_batch() -> None:
        """Wait in code without a file, as dataclasses make it."""
        exec("while is_alive(): sleep(0.01)", {"is_alive": waits.is_alive, "sleep": time.sleep})

    with loop(config, ("actor", pool.sync[:1])) as cb, cb.stage(stage) if stage else nullcontext():
        waits.start()
        load_batch()
    (hang,) = found
    assert (hang.lane, hang.stage) == ("controller", stage)
    assert re.fullmatch(r"is in its own code at .*test_hangs\.py:\d+ in load_batch", hang.reason)


def test_a_loop_that_is_left_in_a_hang_keeps_what_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after SIGTERM: nothing goes on, and the stacks stay."""

    def is_ended() -> None:
        with loop(config) as callback, callback.stage("update_actor"):
            the_hang(config)
            sys.exit(143)

    config = watched(tmp_path)
    with pytest.raises(SystemExit):
        is_ended()
    assert "goes on" not in caplog.text
    assert of_process(config, "loop")["stages"][0]["name"] == "update_actor"
    assert main(["check", str(config.save_path)]) == 1
    assert "step 4 hangs: in update_actor" in capsys.readouterr().out


def test_a_task_that_ray_cannot_schedule_is_told(tmp_path: Path, pool: Pool) -> None:
    config = watched(tmp_path)
    set_up(config, pool.sync[:1])
    with loop(config, ("actor", pool.sync[:1])) as callback, callback.stage("reward"):
        waits = ray.remote(num_gpus=1000)(lambda: None).remote()
        cancelling = threading.Thread(target=lambda: (the_hang(config), ray.cancel(waits)))
        cancelling.start()
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(waits, timeout=60)
        cancelling.join()
    assert "for Ray, with no worker in anything" in hangs(config)[0].reason


def test_two_hangs_of_one_step_are_told_apart(
    tmp_path: Path, agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first tool returns, and the next one of the same call hangs: the loop sees neither."""
    config, switches = watched(tmp_path), [tmp_path / "first", tmp_path / "second"]
    for switch in switches:
        switch.touch()
    with loop(config, ("agent_loop", [agents])) as callback, callback.stage("rollout"):
        calls = agents.call_tools.remote(switches)
        first = the_hang(config)
        time.sleep(4)  # it is asked again, and is the same
        assert len(hangs(config)) == 1
        switches[0].unlink()
        assert after_a_while(lambda: len(hangs(config)) == 2, 30), caplog.messages
        second = hangs(config)[1]
        switches[1].unlink()
        ray.get(calls)
    assert first.lane == second.lane == "agent_loop_rank0"
    assert [text.partition(",")[0] for text in caplog.messages if "step 4 goes on" in text] == [
        "watch: step 4 goes on"
    ] * 2


def test_a_long_step_that_progresses_is_no_hang(
    tmp_path: Path, pool: Pool, agents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A busy worker whose stages end, and trajectories that end, for much longer than the limit."""
    caplog.set_level("INFO")
    config = watched(tmp_path, hang_s=1.5)
    set_up(config, pool.sync[:2])
    ray.get(pool.sync[0].work.remote())  # it imports torch
    with loop(config, ("actor", pool.sync[:2]), ("agent_loop", [agents])) as callback:
        with callback.stage("update_actor"):
            ray.get(
                pool.sync[0].work.remote([f"part{number}" for number in range(12)], seconds=0.4)
            )
        with callback.stage("rollout"):
            for _ in range(6):
                ray.get(agents.call_tool.remote(tmp_path / "none"))
                time.sleep(0.4)
    assert hangs(config) == []
    [slow] = [text for text in caplog.messages if "is slow" in text]
    assert re.fullmatch(r"watch: step 4 is slow but not hung: \d.* s in update_actor so far", slow)


def test_a_stage_that_usually_takes_long_is_given_the_time(tmp_path: Path) -> None:
    """Three times what it usually takes; what is not known yet has ``first_hang_s``."""
    config = watched(tmp_path, hang_s=0.25, first_hang_s=1.0)
    with ProfilingCallback(config) as callback:
        for step in range(1, 4):
            callback.on_step_begin(step)
            with callback.stage("rollout"):
                time.sleep(0.5 if step < 3 else 0.9)
            callback.on_step_end()
    assert len(lines(config)) == 3
    assert hangs(config) == []


def test_quiet_steps_leave_nothing(tmp_path: Path, pool: Pool) -> None:
    """Neither a line nor a folder."""
    config = watched(tmp_path, hang_s=1.5, first_hang_s=5.0)
    set_up(config, pool.sync)
    ray.get([worker.work.remote() for worker in pool.sync])  # they import torch
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", pool.sync)
        for step in range(1, 80):
            callback.on_step_begin(step)
            with callback.stage("update_actor"):
                ray.get([worker.work.remote() for worker in pool.sync])
            callback.on_step_end()
    assert hangs(config) == []
    assert not Path(config.save_path, "hangs").exists()


def looking(worker: Any = None) -> list[int | None]:
    """Return the threads that look for hangs, or are about to end: of this process,
    or of a worker.
    """

    def here(of: Any) -> list[int | None]:
        return [one.ident for one in threading.enumerate() if one.name == "verl-profiling-hangs"]

    return here(None) if worker is None else ray.get(worker.__ray_call__.remote(here))


def test_a_worker_looks_until_the_training_ends(tmp_path: Path, pool: Pool) -> None:
    """One thread in all steps, as a call in each could come too late;
    the loop's own ends with a step.
    """
    config, [worker] = watched(tmp_path), pool.sync[:1]
    set_up(config, [worker])

    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", [worker])
        callback.on_step_begin(1)
        assert after_a_while(lambda: len(looking()) == len(looking(worker)) == 1)
        first = looking(worker)
        callback.on_step_end()
        assert after_a_while(lambda: not looking())
        callback.on_step_begin(2)
        assert after_a_while(lambda: len(looking()) == 1)
        assert looking(worker) == first
        callback.on_step_end()
        assert after_a_while(lambda: not looking())
        assert looking(worker) == first
    assert after_a_while(lambda: not looking(worker))


def test_a_worker_that_is_told_again_has_one_thread(tmp_path: Path, pool: Pool) -> None:
    """As after many trainings, whose calls a busy worker answers at once."""
    [worker] = pool.sync[:1]
    set_up(watched(tmp_path), [worker])
    looks = WatchQuestion(hangs=(str(tmp_path), 60.0))
    for question in [looks, WatchQuestion(hangs=NO_LOOKS)] * 20 + [looks, looks]:
        worker.read_watch.remote(question)
    assert after_a_while(lambda: len(looking(worker)) == 1, 10)
    ray.get(worker.read_watch.remote(WatchQuestion(hangs=NO_LOOKS)))
    assert after_a_while(lambda: not looking(worker), 10)


def test_a_rank_that_cannot_report_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thread ends then, although the training goes on."""
    place = msgspec.msgpack.encode((str(tmp_path), 0.01))
    ranks: Any = SimpleNamespace(ended=threading.Event(), get=lambda key: place)
    sums = StageSums(8)
    sums.tokens.append(lambda: 1 // 0)
    report_to_rank_0(ranks, RankUse(lane="actor_rank1", role="actor"), sums)
    try:
        assert after_a_while(lambda: not looking(), 10)
    finally:
        ranks.ended.set()
    assert (
        len([text for text in caplog.messages if "hangs of actor_rank1 are not reported" in text])
        == 1
    )
