"""What holds for every engine that records in processes of its own."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from example_loops import spans

from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.capture_request import CaptureSelection
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.manifest import Artifact, CaptureResult, Request
from verl_profiling.watch.hangs import HangReporter
from verl_profiling.watch.process_sums import Busy, StageSums


def request(folder: Path, step: int = 1, **fields: Any) -> CaptureStart:
    """Return a request for a capture of one step."""
    return CaptureStart(
        capture_id=uuid4().hex,
        run_id="run",
        step=step,
        folder=str(folder / f"step_{step:06d}"),
        **fields,
    )


async def finished(server: Any, result: CaptureResult) -> list[Artifact]:
    artifacts: list[Artifact] = (
        await server.stop_capture(result.capture_id, 60.0)
    ).result.artifacts
    return artifacts


async def stop(server: Any, capture_id: str | None = None) -> CaptureResult:
    result: CaptureResult = (await server.stop_capture(capture_id)).result
    return result


def at_the_stop(result: CaptureResult) -> CaptureResult:
    """Return a result without what the background work on its artifacts changes."""
    artifacts = [
        msgspec.structs.replace(one, status="ok", bytes=0, events=0) for one in result.artifacts
    ]
    return msgspec.structs.replace(result, artifacts=artifacts, revision=0)


def noting(replica: int = 0) -> RequestLog:
    log = RequestLog()
    log.serve(replica, enable=True)
    log.begin(None)
    return log


def reporter_of(log: RequestLog) -> HangReporter:
    """Switch the watch of a log's engine on; return what knows when it progressed last."""
    sums = StageSums(16)
    log.busy = Busy(sums, "generate")
    return HangReporter(("", 1.0), "rollout0_rank0", "rollout", lambda: [sums])


def seconds(request: Request) -> dict[str, float]:
    """Return the parts of a request, which add up to it."""
    parts: dict[str, float] = {name: (end - begin) / 1e9 for name, begin, end in request.parts()}
    assert sum(parts.values()) == pytest.approx((request.end_ns - request.begin_ns) / 1e9)
    return parts


async def assert_idling_with_stacks_is_cheap(server: Any, order: CaptureStart) -> None:
    """Capture an engine that idles around its generation, with stacks and shapes."""
    await server.start_capture(order)
    await asyncio.sleep(3)
    await server.generate(1, 30)
    await asyncio.sleep(3)
    begin = time.monotonic()
    result = await stop(server, order.capture_id)
    assert time.monotonic() - begin < 60
    [artifact] = await finished(server, result)
    assert artifact.status == "ok", artifact
    trace = Path(order.folder) / artifact.path
    assert server.iterations(trace) == 10, "the default of rollout.count with stacks"
    assert any(event.get("cat") == "python_function" for event in spans(trace))
    assert any("Input Dims" in event.get("args", {}) for event in spans(trace))


class Captures:
    ranks = 1

    async def capture(self, server: Any, order: CaptureStart, tokens: int = 4) -> list[Path]:
        """Capture one generation; return the artifacts' paths after checking that all are ok."""
        reply = await server.start_capture(order)
        assert reply.status == "recording", reply
        await server.generate(2, tokens)
        result = await stop(server, order.capture_id)
        assert result.status == "ok", result.reason
        artifacts = await finished(server, result)
        assert [a.path for a in artifacts] == [a.path for a in reply.expected]
        for artifact in artifacts:
            assert artifact.status == "ok", artifact
            assert artifact.events
            assert artifact.bytes == (Path(order.folder) / artifact.path).stat().st_size
            assert artifact.begin_ns < artifact.end_ns
        return [Path(order.folder) / artifact.path for artifact in artifacts]


class EngineContract(Captures):
    streams = True

    async def test_two_captures_land_in_their_own_step_folders(
        self, server: Any, tmp_path: Path
    ) -> None:
        """Each of two captures in one engine life has its own folder,
        canonical names and events.
        """
        server.reconfigure()
        for step in (1, 7):
            paths = await self.capture(server, request(tmp_path, step))
            names = [f"rollout0_rank{rank}.torch.json.gz" for rank in range(self.ranks)]
            assert [path.name for path in paths] == names
            assert sorted(path.name for path in paths[0].parent.iterdir()) == [
                "rollout0.result.json",
                *names,
            ]
            assert paths[0].parent.name == f"step_{step:06d}"
            assert all(server.iterations(path) >= 4 for path in paths)

    async def test_discrete_windows_are_named_by_stage_and_occurrence(
        self, server: Any, tmp_path: Path
    ) -> None:
        """Two rollout windows of one step are two artifacts per rank."""
        server.reconfigure(mode="discrete")
        first = await self.capture(server, request(tmp_path, stage="rollout"))
        again = await self.capture(server, request(tmp_path, stage="rollout", occurrence=2))
        assert first[0].name == "rollout0_rank0.rollout.torch.json.gz"
        assert again[0].name == "rollout0_rank0.rollout.2.torch.json.gz"

    async def test_start_again_joins_and_stop_again_repeats(
        self, server: Any, tmp_path: Path
    ) -> None:
        """The same capture id joins; an ended capture gives its result again."""
        server.reconfigure()
        order = request(tmp_path)
        await server.start_capture(order)
        joined = await asyncio.gather(server.start_capture(order), server.start_capture(order))
        assert [reply.status for reply in joined] == ["joined", "joined"]
        await server.generate(1, 2)
        first = await stop(server, order.capture_id)
        again = await stop(server, order.capture_id)
        assert at_the_stop(first) == at_the_stop(again)
        assert first.status == "ok"
        assert first.cost_s("stop") > 0
        assert [(span.name, span.stage) for span in first.tool_spans] == [
            ("start", None),
            ("stop", None),
        ]
        assert first.tool_spans[0].end_ns <= first.artifacts[0].end_ns <= first.tool_spans[1].end_ns

    async def test_stop_without_start_is_skipped(self, server: Any) -> None:
        """Stopping what was never started says so, and the next capture is not disturbed."""
        server.reconfigure()
        result = await stop(server, "never")
        assert (result.status, result.identity.name) == ("skipped", "rollout0")
        assert "nothing is open" in result.reason

    async def test_another_capture_closes_the_open_one(self, server: Any, tmp_path: Path) -> None:
        """Its loop has forgotten it: its result on disk is a failure,
        and the next capture is whole.
        """
        server.reconfigure()
        order, after = request(tmp_path, 3), request(tmp_path, 4)
        await server.start_capture(order)
        await server.generate(1, 2)
        paths = await self.capture(server, after)
        assert [path.parent.name for path in paths] == ["step_000004"] * self.ranks
        left = json.loads((Path(order.folder) / "rollout0.result.json").read_text())
        assert (left["status"], left["reason"], left["step"]) == ("failed", "never stopped", 3)
        assert len(left["requests"]) == 1

    async def test_uncreatable_folder_leaves_the_engine_alone(
        self, server: Any, tmp_path: Path
    ) -> None:
        """A step folder that cannot be made is an error at the start; the next capture works."""
        server.reconfigure()
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file"):
            await server.start_capture(request(tmp_path / "file"))
        assert (await stop(server)).status != "failed"
        await self.capture(server, request(tmp_path))

    async def test_warm_up_leaves_nothing(self, server: Any, tmp_path: Path) -> None:
        """A capture that is not kept runs the profiler and throws the trace away."""
        server.reconfigure()
        order = request(tmp_path, keep=False)
        await server.start_capture(order)
        await server.generate(1, 2)
        result = await stop(server, order.capture_id)
        assert (result.status, result.artifacts) == ("skipped", [])
        assert not list(Path(order.folder).glob("*"))

    async def test_requests_are_noted_only_while_capturing(
        self, server: Any, tmp_path: Path
    ) -> None:
        """Times and lengths of each request, with the policy version, and of no other request."""
        server.reconfigure()
        await server.generate(3, 2)
        order = request(tmp_path, policy_version=5)
        await server.start_capture(order)
        await server.generate(4, 6)
        result = await stop(server, order.capture_id)
        await server.generate(1, 2)
        assert len(result.requests) == 4
        for noted in result.requests:
            assert (noted.prompt_tokens, noted.response_tokens) == (4, 6)
            assert (noted.replica, noted.policy_version, noted.failed) == (0, 5, False)
            assert noted.begin_ns < noted.end_ns
            assert (noted.begin_ns < noted.first_token_ns < noted.end_ns) is self.streams

    async def test_a_capture_over_a_weight_update_has_both_versions(
        self, server: Any, tmp_path: Path
    ) -> None:
        """Requests carry the version that they began with;
        the server's word comes before the loop's.
        """
        server.reconfigure()
        order = request(tmp_path, policy_version=5)
        await server.start_capture(order)
        await server.generate(2, 2)
        server.set_policy_version(6)
        await server.generate(1, 2)
        result = await stop(server, order.capture_id)
        assert result.policy_versions == [5, 6]
        assert [noted.policy_version for noted in result.requests] == [5, 5, 6]
        order = request(tmp_path, step=2, policy_version=5)
        await server.start_capture(order)
        result = await stop(server, order.capture_id)
        assert (result.policy_versions, result.notes) == ([6], [])

    async def test_a_generation_that_raises_passes_through(
        self, server: Any, tmp_path: Path
    ) -> None:
        """The user's exception is untouched and the capture goes on."""
        server.reconfigure()
        order = request(tmp_path)
        await server.start_capture(order)
        with pytest.raises(Exception, match=server.too_long_message):
            await server.generate_too_long()
        await server.generate(1, 2)
        result = await stop(server, order.capture_id)
        assert result.status == "ok"
        assert [noted.failed for noted in result.requests] == [True, False]

    async def test_a_replica_that_is_not_selected_is_skipped(
        self, server: Any, tmp_path: Path
    ) -> None:
        """Global ranks and replicas select; the engine is not touched otherwise."""
        for select in ({"ranks": "8"}, {"replicas": "1"}, {"roles": ["actor"]}):
            server.reconfigure(select=select)
            order = request(tmp_path)
            assert (await server.start_capture(order)).status == "skipped"
            assert (await stop(server, order.capture_id)).status == "skipped"


class WindowContract(EngineContract):
    """Tests that every engine passes whose profiler runs in separate processes."""

    windows: tuple[dict[str, Any], ...] = (
        {"count": 1},
        {"count": 3},
        {"start": 2, "count": 3},
        {"start": 1, "count": 1},
    )

    async def test_window_holds_exactly_count_iterations(self, server: Any, tmp_path: Path) -> None:
        for step, window in enumerate(self.windows):
            server.reconfigure(rollout=window)
            paths = await self.capture(server, request(tmp_path, step), tokens=12)
            assert [server.iterations(path) for path in paths] == [window["count"]] * self.ranks, (
                window
            )

    async def test_unreached_window_is_empty_and_the_next_capture_clean(
        self, server: Any, tmp_path: Path
    ) -> None:
        """A window that generation does not reach gives `empty`, and does not fire later."""
        server.reconfigure(rollout={"start": 500, "count": 2})
        order = request(tmp_path, 1)
        await server.start_capture(order)
        await server.generate(1, 3)
        result = await stop(server, order.capture_id)
        assert result.status == "empty"
        assert "never began" in result.reason
        server.reconfigure(rollout={"start": 0, "count": 2})
        paths = await self.capture(server, request(tmp_path, 2), tokens=8)
        assert server.iterations(paths[0]) == 2
        left = [path.name for path in (tmp_path / "step_000001").iterdir()]
        assert left == ["rollout0.result.json"]

    async def test_an_aim_holds_for_one_capture(self, server: Any, tmp_path: Path) -> None:
        """Of one rank, or by stage; aimed at others, or at a tool it has not,
        the engine records nothing.
        """
        server.reconfigure()
        last = self.ranks - 1
        paths = await self.capture(
            server,
            request(tmp_path, 1, selection=CaptureSelection(roles=("rollout",), ranks=(last,))),
        )
        assert [path.name for path in paths] == [f"rollout0_rank{last}.torch.json.gz"]
        selection = CaptureSelection(mode="discrete", stages=("rollout",), replicas=(0,))
        paths = await self.capture(
            server, request(tmp_path, 2, selection=selection, stage="rollout")
        )
        assert [path.name for path in paths] == [
            f"rollout0_rank{rank}.rollout.torch.json.gz" for rank in range(self.ranks)
        ]
        aims = {
            CaptureSelection(replicas=(1,)): "not selected",
            CaptureSelection(ranks=(8,)): "not selected",
            CaptureSelection(roles=("actor",)): "not selected",
            CaptureSelection(stages=("update_actor",)): "not selected",
            CaptureSelection(tools=("torch_memory",)): "was started to record with torch alone",
        }
        for step, (selection, why) in enumerate(aims.items(), 3):
            order = request(tmp_path, step, selection=selection)
            reply = await server.start_capture(order)
            assert (reply.status in ("skipped", "refused"), why in reply.reason) == (True, True), (
                reply
            )
            await server.generate(1, 20)
            assert (await stop(server, order.capture_id)).status == "skipped"
        paths = await self.capture(server, request(tmp_path, 9))
        assert [path.name for path in paths] == [
            f"rollout0_rank{rank}.torch.json.gz" for rank in range(self.ranks)
        ]
        assert all(4 <= server.iterations(path) < 20 for path in paths)
        assert len(list(tmp_path.iterdir())) == 3, (
            "of a capture that is aimed at others there is no folder"
        )

    async def test_stop_while_generating(self, server: Any, tmp_path: Path) -> None:
        """Stopping early returns a whole trace, and generation goes on to its end."""
        server.reconfigure()
        order = request(tmp_path)
        await server.start_capture(order)
        generation = asyncio.create_task(server.generate(2, 60))
        await asyncio.sleep(0.1)
        result = await stop(server, order.capture_id)
        assert await generation == 120
        artifacts = await finished(server, result)
        assert [artifact.status for artifact in artifacts] == ["ok"] * self.ranks

    async def test_window_ends_by_time(self, server: Any, tmp_path: Path) -> None:
        """After `rollout.max_window_s` the engine stops recording by itself;
        the stop still collects.
        """
        server.reconfigure(rollout={"max_window_s": 0.3})
        order = request(tmp_path)
        await server.start_capture(order)
        await server.generate(1, 3)
        await asyncio.sleep(1.5)
        await server.generate(1, 50)
        result = await stop(server, order.capture_id)
        artifacts = await finished(server, result)
        assert [artifact.status for artifact in artifacts] == ["ok"] * self.ranks
        assert server.iterations(Path(order.folder) / artifacts[0].path) < 50
        assert "rollout.max_window_s" in result.notes[0]
        assert artifacts[0].end_ns - artifacts[0].begin_ns < 1e9

    async def test_a_stop_past_its_deadline_fails_and_delivers_later(
        self, server: Any, tmp_path: Path
    ) -> None:
        """The result is `failed` after `rollout.stop_s`;
        what is written later is in the result on disk.
        """
        server.reconfigure(rollout={"stop_s": 0.001})
        order = request(tmp_path)
        await server.start_capture(order)
        await server.generate(2, 30)
        result = await stop(server, order.capture_id)
        assert result.status == "failed"
        assert "0.001 s after the stop" in result.reason
        late: list[dict[str, Any]] = []
        for _ in range(300):
            left = json.loads((Path(order.folder) / "rollout0.result.json").read_text())
            late = left["artifacts"]
            if {artifact["status"] for artifact in late} == {"ok"}:
                break
            await asyncio.sleep(0.1)
        assert [one["status"] for one in late] == ["ok"] * self.ranks
        assert all("artifact late" in one["reason"] for one in late)
        assert left["capture_id"] == order.capture_id
        server.reconfigure()
        await self.capture(server, request(tmp_path, 2))


class RanksContract(Captures):
    """Tests of an engine with several ranks: each has its trace."""

    windows: tuple[dict[str, Any], ...] = ({"count": 1}, {"count": 3})
    test_two_captures = EngineContract.test_two_captures_land_in_their_own_step_folders
    test_windows_are_exact = WindowContract.test_window_holds_exactly_count_iterations
    test_an_aim = WindowContract.test_an_aim_holds_for_one_capture
    test_a_late_stop = WindowContract.test_a_stop_past_its_deadline_fails_and_delivers_later
