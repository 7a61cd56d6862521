"""Background work: in order, never lost, and gone when there is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from verl_profiling.capture.finishing import BackgroundWork, finish
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.manifest import Artifact
from verl_profiling.tools import Output

PENDING = Artifact(path="a", lane="a", tool="t", status="pending")


def done(path: str = "a") -> Artifact:
    """Return the artifact as finished."""
    return msgspec.structs.replace(PENDING, path=path, status="ok")


def submit(
    background: BackgroundWork, work: Callable[[], Artifact], news: Callable[[Artifact], object]
) -> None:
    """Queue the rest of the work on an artifact."""
    request = CaptureRequest(capture_id="1", run_id="run", step=1, folder="")
    now = finish(Output(PENDING, work), background, request, news)
    assert now.status == "pending"


def threads() -> list[str]:
    """Return the names of finisher threads."""
    return [t.name for t in threading.enumerate() if t.name == "verl-profiling-finisher"]


def test_work_is_done_in_order_and_told_once() -> None:
    """Finished artifacts are passed on in order of submission, each once."""
    finisher, news = BackgroundWork("finisher"), []
    for number in range(5):
        submit(finisher, lambda number=number: done(str(number)), news.append)
    assert finisher.drain(10)
    assert [artifact.path for artifact in news] == [str(number) for number in range(5)]


def test_draining_waits_no_longer_than_told() -> None:
    """It returns whether all work was done in time; the rest continues."""
    finisher, go, news = BackgroundWork("finisher"), threading.Event(), []
    submit(finisher, lambda: go.wait(60) and done(), news.append)
    begin = time.monotonic()
    assert not finisher.drain(0.1)
    assert 0.1 <= time.monotonic() - begin < 20
    assert news == []
    go.set()
    assert finisher.drain(10)
    assert len(news) == 1
    assert finisher.drain(0)


def test_work_that_raises_is_a_failed_artifact_and_the_next_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Logged with its path."""

    def fail() -> Artifact:
        raise ValueError("broken")

    finisher, news = BackgroundWork("finisher"), []
    submit(finisher, fail, news.append)
    submit(finisher, done, news.append)
    assert finisher.drain(10)
    first, second = news
    assert (first.status, first.reason) == ("failed", "finishing it raised ValueError: broken")
    assert second.status == "ok"
    assert "finishing a failed" in caplog.text


def test_submitting_does_not_wait() -> None:
    """The training goes on while the work is done elsewhere."""
    finisher, go = BackgroundWork("finisher"), threading.Event()
    begin = time.monotonic()
    for _ in range(10):
        submit(finisher, lambda: go.wait(60) and done(), print)
    assert time.monotonic() - begin < 20
    assert len(threads()) >= 1
    go.set()
    assert finisher.drain(10)


def test_the_thread_ends_when_idle_and_comes_back(session: object) -> None:
    """No work, no thread; later work starts one again."""
    finisher, news = BackgroundWork("finisher"), []
    submit(finisher, done, news.append)
    assert finisher.drain(10)
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threads() == []
    submit(finisher, done, news.append)
    assert finisher.drain(10)
    assert len(news) == 2
