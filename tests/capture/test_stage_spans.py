"""Stages: what they record, and that user code never notices them."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings

from verl_profiling import ProfilingCallback, stage
from verl_profiling.clock import now_ns
from verl_profiling.manifest import StageSpan
from verl_profiling.testing import record_step

SPANS = settings(tool="spans")


@contextlib.contextmanager
def recorded_stages(tmp_path: Path) -> Iterator[list[StageSpan]]:
    """Yield a list that holds the spans once the block is left."""
    found: list[StageSpan] = []
    with record_step(SPANS, tmp_path) as recorded:
        yield found
    found += recorded.result.stages


def shape(spans: list[StageSpan]) -> list[tuple[str, int, bool]]:
    return [(span.name, span.depth, span.failed) for span in spans]


def test_blocks_are_spans_that_nest(tmp_path: Path) -> None:
    """Each has begin, end, thread and depth, in the order of the begins;
    outside of a capture is none.
    """
    with stage("before"):
        pass
    with recorded_stages(tmp_path) as found:
        before = now_ns()
        with stage("outer"):
            inside = now_ns()
            with stage("inner"), stage("innermost"):
                pass
            with stage("inner"):
                pass
        after = now_ns()
        with stage("next"):
            pass
    with stage("after"):
        pass
    assert shape(found) == [
        ("outer", 0, False),
        ("inner", 1, False),
        ("innermost", 2, False),
        ("inner", 1, False),
        ("next", 0, False),
    ]
    assert before <= found[0].begin_ns <= inside <= found[0].end_ns <= after
    assert found[0].thread == threading.get_native_id()


def test_what_is_decorated_keeps_its_result_and_its_looks(tmp_path: Path) -> None:
    """Functions and methods of all kinds: their value, name, docstring,
    signature and attributes.
    """

    def double(value: int, *, plus: int = 0) -> int:
        """Double it."""
        return 2 * value + plus

    double.mark = "kept"  # type: ignore[attr-defined]
    decorated = stage("compute")(double)

    class Worker:
        value = 3

        @stage("a")
        def method(self) -> int:
            return self.value

        @classmethod
        @stage("b")
        def of_class(cls) -> int:
            return cls.value

    with recorded_stages(tmp_path) as found:
        assert [decorated(3, plus=1), Worker().method(), Worker.of_class()] == [7, 3, 3]
    assert [span.name for span in found] == ["compute", "a", "b"]
    assert (decorated.__name__, decorated.__doc__) == ("double", "Double it.")
    assert inspect.signature(decorated) == inspect.signature(double)
    assert decorated.mark == "kept"  # type: ignore[attr-defined]


async def test_a_decorated_coroutine_function_is_a_span_until_it_is_done(tmp_path: Path) -> None:
    """It stays a coroutine function, and its span covers what it awaits."""

    @stage("generate")
    async def generate(value: int) -> int:
        with stage("wait"):
            await asyncio.sleep(0.01)
        return value

    assert inspect.iscoroutinefunction(generate)
    with recorded_stages(tmp_path) as found:
        assert await generate(5) == 5
    assert shape(found) == [("generate", 0, False), ("wait", 1, False)]
    assert found[0].end_ns - found[0].begin_ns >= 10_000_000


async def test_an_async_block_is_a_span(tmp_path: Path) -> None:
    """``async with stage(...)`` records what ``with`` does, in tasks side by side,
    and exceptions pass.
    """

    async def one(name: str) -> None:
        async with stage(name), stage("inner"):
            await asyncio.sleep(0.01)

    with recorded_stages(tmp_path) as found:
        async with stage("outer"):
            await asyncio.gather(one("a"), one("b"))
        with pytest.raises(ValueError, match="passes"):
            async with stage("failing"):
                raise ValueError("passes")
        async with ProfilingCallback({"enable": False}).stage("of the callback"):
            pass
    of_tasks = sorted(shape(found[1:5]))
    assert of_tasks == [("a", 1, False), ("b", 1, False), ("inner", 2, False), ("inner", 2, False)]
    assert shape([found[0], *found[5:]]) == [("outer", 0, False), ("failing", 0, True)]


class Name(str, Enum):
    UPDATE = "update_actor"


def bare() -> None:
    """Be decorated with a bare ``@stage``."""


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "stage() was given NoneType instead of a name; a stage's name is text"),
        (3, "stage() was given int instead of a name; a stage's name is text"),
        (b"update", "stage() was given bytes instead of a name; a stage's name is text"),
        (["unhashable"], "stage() was given list instead of a name; a stage's name is text"),
        (bare, 'stage() was given bare instead of a name; write @stage("bare") above a function'),
        (" ", "stage(' '): the name is empty; write stage(\"update_actor\")"),
        ("\udcff", r"stage('\udcff'): the name cannot be written as UTF-8"),
    ],
)
def test_what_is_no_name_is_refused_when_the_stage_is_made(
    tmp_path: Path, recording: bool, name: Any, message: str
) -> None:
    """With the same sentence on a step that records, on one that does not,
    and without profiling.
    """
    off, on = (
        ProfilingCallback({"enable": False}),
        ProfilingCallback(settings(save_path=str(tmp_path))),
    )
    with record_step(SPANS, tmp_path) if recording else contextlib.nullcontext():
        for make in (stage, off.stage, on.stage):
            with pytest.raises((TypeError, ValueError)) as caught:
                make(name)
            assert str(caught.value) == message


def test_a_name_of_a_text_type_is_plain_text(tmp_path: Path) -> None:
    """Members of an enumeration and other kinds of text can be written down like any name."""

    class Text(str):
        __slots__ = ()

    with recorded_stages(tmp_path) as spans:
        for name in (Name.UPDATE, Text("reward")):
            with stage(name):
                pass
    assert [span.name for span in spans] == ["update_actor", "reward"]
    assert {type(span.name) for span in spans} == {str}
    assert stage(Name.UPDATE) is stage("update_actor")


def test_generator_functions_are_refused() -> None:
    """Their bodies run after they have returned, so a span around the call would lie."""

    def sync_generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    for function in (sync_generator, async_generator):
        with pytest.raises(
            TypeError, match=r"generator function .*write `with stage\(...\)` inside it"
        ):
            stage("generate")(function)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
    ],
)
def test_what_user_code_raises_passes_untouched(tmp_path: Path, error: BaseException) -> None:
    """The very object that was raised comes out, and the span is marked as failed."""

    @stage("inner")
    def fail() -> None:
        raise error

    with recorded_stages(tmp_path) as found:
        with pytest.raises(type(error)) as caught, stage("outer"):
            fail()
        with stage("next"):
            pass
    assert caught.value is error
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert shape(found) == [("outer", 0, True), ("inner", 1, True), ("next", 0, False)]


def test_threads_do_not_see_each_others_stages(tmp_path: Path) -> None:
    """Stages that overlap on several threads are each outermost, on their own thread."""
    together = threading.Barrier(4)

    def work(name: str) -> None:
        with stage(name):
            together.wait()
            with stage("inside"):
                together.wait()

    with recorded_stages(tmp_path) as found, stage("main"):
        threads = [threading.Thread(target=work, args=(f"t{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    outer = [span for span in found if span.name != "inside"]
    assert {(span.name, span.depth, span.failed) for span in outer} == {
        (name, 0, False) for name in ("main", "t0", "t1", "t2", "t3")
    }
    assert len({span.thread for span in outer}) == 5
    assert [span.depth for span in found if span.name == "inside"] == [1] * 4


def test_a_stage_that_was_entered_before_the_capture_is_not_in_it(tmp_path: Path) -> None:
    """Its end, inside the capture, closes nothing that began there."""
    with contextlib.ExitStack() as outside, contextlib.ExitStack() as capture:
        outside.enter_context(stage("a"))
        found = capture.enter_context(recorded_stages(tmp_path))
        with stage("a"):
            pass
        outside.close()
        with stage("b"):
            pass
        capture.close()
    assert shape(found) == [("a", 0, False), ("b", 0, False)]


def test_a_stage_that_is_left_after_the_capture_is_cut_off(tmp_path: Path) -> None:
    """It is in the result, as failed, up to the moment the capture closed;
    later captures are clean.
    """
    with contextlib.ExitStack() as inside:
        with recorded_stages(tmp_path) as found:
            inside.enter_context(stage("a"))
            inside.enter_context(stage("b"))
        with recorded_stages(tmp_path) as later:
            with stage("c"):
                pass
            inside.close()
            with stage("d"):
                pass
    assert shape(found) == [("a", 0, True), ("b", 1, True)]
    assert shape(later) == [("c", 0, False), ("d", 0, False)]


def test_a_hot_loop_cannot_fill_the_memory(tmp_path: Path) -> None:
    """Only the first twenty thousand spans are kept, and the result says so."""
    with record_step(SPANS, tmp_path) as recorded:
        for _ in range(20_003):
            with stage("hot"):
                pass
    assert len(recorded.result.stages) == 20_000
    assert any("3 stages" in note and "hot loop" in note for note in recorded.result.notes)


def test_decorated_classes_travel_to_other_processes(ray_cluster: None) -> None:
    """A pickled stage is the stage of the process that unpickles it, a Ray actor's included."""
    import ray
    from ray import cloudpickle

    assert pickle.loads(pickle.dumps(stage("a"))).name == "a"
    by_value: Any = cloudpickle.loads(cloudpickle.dumps(_local_class()))
    assert by_value().update() == "done"
    actor = ray.remote(num_cpus=0)(_local_class()).remote()
    assert ray.get(actor.update.remote()) == "done"
    ray.kill(actor)


def _local_class() -> type:
    class Local:
        @stage("update_actor")
        def update(self) -> str:
            return "done"

    return Local


def test_stages_of_a_loop_and_of_its_worker_nest_apart(tmp_path: Path) -> None:
    """In one process, the controller's stages and the worker's are two logs
    with their own depths.
    """
    from fleet import TrainWorker

    from verl_profiling.files.run_files import read_manifest

    config = settings(tool="spans", save_path=str(tmp_path), schedule={"steps": [1]})
    worker = TrainWorker()
    worker.set_up(config)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", worker)
    callback.on_step_begin(1)
    with callback.stage("fit"), stage("outer"), callback.stage("update"), stage("inner"):
        pass
    with callback.stage("forgotten"):
        stage("never left").__enter__()
    with callback.stage("last"):
        pass
    callback.on_step_end()
    manifest = read_manifest(tmp_path / "step_000001")
    assert shape(manifest.stages) == [
        ("fit", 0, False),
        ("update", 1, False),
        ("forgotten", 0, False),
        ("last", 0, False),
    ]
    assert shape(manifest.workers[0].stages) == [
        ("outer", 0, False),
        ("inner", 1, False),
        ("never left", 0, True),
    ]
