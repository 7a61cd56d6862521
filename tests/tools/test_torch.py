"""The ``torch`` tool: what it records, and that it never crashes the process."""

from __future__ import annotations

import gzip
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from example_loops import read_trace, settings, spans, train

from verl_profiling import CaptureStateError, ToolUnavailableError, stage
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact
from verl_profiling.testing import record_step
from verl_profiling.tools import Output
from verl_profiling.tools.torch_profiler import output_of_trace


def op_arguments(path: Path, name: str = "aten::addmm") -> dict[str, Any]:
    return spans(path, name)[0]["args"]


def test_a_trace_holds_ops_stages_and_who_recorded(tmp_path: Path) -> None:
    """Kineto's trace in unix time, with our metadata at its top and stages as annotations;
    nothing costly.
    """
    with record_step(settings(), tmp_path) as recorded, stage("update_actor"):
        train()
    [artifact], [span] = recorded.result.artifacts, recorded.result.stages
    path = tmp_path / artifact.path
    trace = read_trace(path)
    [annotation] = spans(path, "update_actor")
    assert annotation["cat"] == "user_annotation"
    about = trace["verl_profiling"]
    assert (about["step"], about["run_id"], about["stage"]) == (1, "test", None)
    assert msgspec.convert(about["worker"], WorkerIdentity).name == "actor_rank0"
    assert (artifact.status, artifact.bytes) == ("ok", path.stat().st_size)
    assert artifact.events == len(trace["traceEvents"])
    assert {file.name for file in tmp_path.iterdir()} == {path.name, "actor_rank0.result.json"}
    begin_ns = trace["baseTimeNanoseconds"] + round(spans(path, "aten::addmm")[0]["ts"] * 1000)
    assert artifact.begin_ns <= span.begin_ns <= begin_ns + 1_000_000
    assert begin_ns <= span.end_ns <= artifact.end_ns
    assert "Input Dims" not in op_arguments(path)
    assert "[memory]" not in {event["name"] for event in trace["traceEvents"]}
    assert not any(event.get("cat") == "python_function" for event in spans(path))


@pytest.mark.filterwarnings("error")
def test_what_is_asked_for_reaches_the_trace(tmp_path: Path) -> None:
    """Dimensions of the inputs of every op, every allocation, and Python frames:
    who trained is in them.
    """
    options = {"shapes": True, "memory": True, "stack": True}
    with record_step(settings(tools={"torch": options}), tmp_path) as recorded:
        train()
    path = recorded.path
    assert op_arguments(path)["Input Dims"][1] == [4, 8]
    events = read_trace(path)["traceEvents"]
    assert any(event["args"]["Bytes"] > 0 for event in events if event["name"] == "[memory]")
    frames = [event["name"] for event in spans(path) if event.get("cat") == "python_function"]
    assert any("train" in name and "example_loops.py" in name for name in frames)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_activities_that_the_machine_lacks_are_refused_at_set_up(tmp_path: Path) -> None:
    """The error names the key, the missing activity and the available ones."""
    with (
        pytest.raises(
            ToolUnavailableError,
            match=r"tools\.torch\.activities: .* cannot record cuda here, only cpu",
        ),
        record_step(settings(tools={"torch": {"activities": ["cpu", "cuda"]}}), tmp_path),
    ):
        pass


def test_all_threads_are_recorded(tmp_path: Path) -> None:
    """Those that ran before the start, and those that begin while it records."""
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        with stage("on a thread"):
            train()

    early = threading.Thread(target=work)
    early.start()
    with record_step(settings(), tmp_path) as recorded:
        late = threading.Thread(target=work)
        late.start()
        go.set()
        early.join()
        late.join()
        train()
    done.set()
    assert len({op["tid"] for op in spans(recorded.path, "aten::addmm")}) == 3
    assert len({mark["tid"] for mark in spans(recorded.path, "on a thread")}) == 2


@pytest.mark.parametrize(
    ("window", "steps", "kept"),
    [
        ({"active": 2}, 4, [0, 1]),
        ({"wait": 1, "warmup": 1, "active": 1}, 4, [2]),
        ({"wait": 2, "active": 10}, 4, [2, 3]),
    ],
)
@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_mini_batch_window_is_exact(
    tmp_path: Path, session: Any, window: dict[str, int], steps: int, kept: list[int]
) -> None:
    """Exactly the mini-batches of the window are in the trace."""
    with record_step(settings(tools={"torch": {"mini_batches": window}}), tmp_path) as recorded:
        for number in range(steps):
            with stage(f"mini_batch_{number}"):
                train()
            session.step()
    assert recorded.result.status == "ok", recorded.result.reason
    names = [event["name"] for event in spans(recorded.path)]
    assert [number for number in range(steps) if f"mini_batch_{number}" in names] == kept
    assert names.count("aten::addmm") == len(kept)
    assert read_trace(recorded.path)["verl_profiling"]["step"] == 1


def test_a_mini_batch_window_that_is_not_reached_is_empty(tmp_path: Path, session: Any) -> None:
    window = {"wait": 2, "active": 1}
    with record_step(settings(tools={"torch": {"mini_batches": window}}), tmp_path) as recorded:
        train()
        session.step()
    assert recorded.result.status == "empty"
    assert recorded.result.reason == (
        "the mini-batch window opens after 2 calls of capture.step(), and there were 1"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["actor_rank0.result.json"]


def test_a_second_profiler_is_refused(tmp_path: Path) -> None:
    """Two torch profilers in one process crash it, so ours does not start;
    the other one is intact.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        with (
            pytest.raises(
                CaptureStateError, match="another torch profiler already records this process"
            ),
            record_step(settings(), tmp_path),
        ):
            pass
        train()
    assert any(event.key == "aten::addmm" for event in theirs.key_averages())


def test_every_stage_name_makes_a_readable_trace(tmp_path: Path) -> None:
    """Kineto writes quotes unescaped and drops non-ASCII characters,
    so it gets a name without either.
    """
    shown = {
        'say "hi"': "say 'hi'",
        "back\\slash": "back/slash",
        "更新": "<66f4><65b0>",
        "tab\there": "tab<9>here",
        "a/b": "a/b",
        "line\nbreak": "line<a>break",
    }
    with record_step(settings(), tmp_path) as recorded:
        for name in shown:
            with stage(name):
                train()
    assert [span.name for span in recorded.result.stages] == list(shown)
    found = {
        event["name"] for event in spans(recorded.path) if event.get("cat") == "user_annotation"
    }
    assert set(shown.values()) <= found


def test_other_threads_and_other_profilers_do_not_crash_the_process(
    run_python: Any, tmp_path: Path
) -> None:
    """Torch has one profiler a process, and what is left of it must not meet the next one."""
    run_python(
        """
        import sys, threading
        from pathlib import Path
        from example_loops import settings, spans, train
        from torch.profiler import ProfilerActivity, profile
        from verl_profiling import stage
        from verl_profiling.testing import record_step

        folder = Path(sys.argv[1])
        for mode in ("e2e", "discrete"):
            for number in range(2):
                inside, leave = threading.Event(), threading.Event()

                def work(inside=inside, leave=leave):
                    with stage("thread"):
                        train()
                        inside.set()
                        leave.wait()
                        train()
                with record_step(settings(mode=mode), folder / f"{mode}{number}") as first:
                    with stage("main"):
                        thread = threading.Thread(target=work)
                        thread.start()
                        inside.wait()
                with record_step(settings(mode=mode), folder / f"{mode}{number}b") as second:
                    with stage("main"):
                        leave.set()
                        thread.join()
                        train()
                for recorded in (first, second):
                    assert recorded.result.status == "ok", recorded.result
                    assert spans(recorded.path, "aten::addmm")
        for ends in ("inside", "after"):
            own = profile(activities=[ProfilerActivity.CPU])
            with record_step(settings(), folder / ends) as first:
                own.start()
                train()
                if ends == "inside":
                    own.stop()
            if ends == "after":
                train()
                own.stop()
            own.export_chrome_trace(str(folder / ends / "own.json"))
            with record_step(settings(), folder / f"{ends}b") as second:
                train()
            assert spans(folder / ends / "own.json", "aten::addmm")
            [artifact] = first.result.artifacts
            assert artifact.status == "failed", artifact
            assert "another torch profiler was started" in artifact.reason, artifact
            assert second.result.artifacts[0].status == "ok", second.result
        """,
        tmp_path,
    )


def output_of(tmp_path: Path, content: bytes | None) -> tuple[Output, Path]:
    """Return what becomes of a raw trace with that content."""
    expected = Artifact(path="a.torch.json.gz", lane="a", tool="torch", status="missing")
    part, final = tmp_path / ".a.part", tmp_path / expected.path
    if content is not None:
        part.write_bytes(content)
    return output_of_trace(part, final, expected), final


@pytest.mark.parametrize("content", [None, b""])
def test_a_profiler_that_wrote_nothing_is_a_failure(tmp_path: Path, content: bytes | None) -> None:
    """Its report of success is not trusted; the reason says what is known of the folder."""
    output, _ = output_of(tmp_path, content)
    assert output.finish is None
    assert output.artifact.status == "failed"
    assert "the profiler wrote no file into" in output.artifact.reason
    assert "MiB free there" in output.artifact.reason
    assert list(tmp_path.iterdir()) == []


def test_a_raw_file_is_kept_when_it_cannot_be_compressed(tmp_path: Path) -> None:
    """Nothing recorded is lost: the raw trace becomes the artifact."""
    content = b'{"traceEvents": [{"ph": "X"}]}'
    output, final = output_of(tmp_path, content)
    final.mkdir()  # what compression would write is in the way
    finished = output.finish()
    final.rmdir()
    assert (finished.status, finished.path, finished.bytes) == ("ok", "a.torch.json", len(content))
    assert finished.reason.startswith("left uncompressed: ")
    assert (tmp_path / finished.path).read_bytes() == content


def test_a_trace_that_is_cut_anywhere_is_not_whole(tmp_path: Path) -> None:
    """Behind the end of an event too, where the last byte is that of a whole trace."""
    content = gzip.decompress(
        (Path(__file__).parents[1] / "data" / "nccl_data.json.gz").read_bytes()
    )
    content = content[-30_000:]
    end = content.rindex(b"]")
    cuts = [cut for cut in range(1, end) if content[cut - 1 : cut] == b"}"]
    assert len(cuts) > 50
    for cut in [*cuts[::25], len(content)]:
        output, _ = output_of(tmp_path, content[:cut])
        assert (output.artifact.status == "truncated") == (cut < len(content)), content[
            cut - 60 : cut
        ]


def test_a_profiler_outside_of_the_mini_batch_window_is_no_matter(
    tmp_path: Path, session: Any
) -> None:
    """One before the window, and one after it; the next capture records as well."""
    window = {"wait": 2, "active": 1}
    for number in range(2):
        with record_step(
            settings(tools={"torch": {"mini_batches": window}}), tmp_path / f"{number}"
        ) as recorded:
            for mini_batch in range(4):
                with torch.profiler.profile() if mini_batch in (0, 3) else nullcontext():
                    train()
                session.step()
        assert recorded.result.status == "ok", recorded.result.artifacts
        assert len(spans(recorded.path, "aten::addmm")) == 1
    closed = record_step(settings(tools={"torch": {"mini_batches": window}}), tmp_path / "closed")
    with closed as recorded, torch.profiler.profile():
        train()
    assert recorded.result.status == "empty"
