"""Engines that join the callback of their run, in processes of this host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_profiling.workers import EngineProcesses, RolloutCaptureMixin
from verl_profiling.workers.processes import CALLBACK, join_run


def test_engines_are_replicas_in_the_order_in_which_they_join(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """They have the callback's settings, and one too many is refused."""
    run_python(
        """
        from pathlib import Path
        from verl_profiling import CaptureStateError
        from verl_profiling.workers import EngineProcesses, RequestLog, RolloutCaptureMixin
        from verl_profiling.workers.processes import join_run

        class Server(RolloutCaptureMixin):
            def init_capture(self, config, **options):
                super().init_capture(config, requests=RequestLog(), **options)

        engines = EngineProcesses({"enable": True, "tool": "spans", "save_path": "run"}, replicas=2)
        servers = [Server(), Server()]
        for replica, server in enumerate(servers):
            assert join_run(Path("run"), server, object(), None)
            assert server._capture_identity.replica == replica
        try:
            join_run(Path("run"), Server(), object(), None)
        except CaptureStateError as error:
            assert "rank 2 is none of 2 processes" in str(error), error
        else:
            raise AssertionError
        """
    )


@pytest.mark.parametrize("content", [None, "{", '{"address": "/nowhere"}'])
def test_a_run_without_a_callback_is_left_to_the_engine(
    content: str | None, tmp_path: Path
) -> None:
    """Also where its file is damaged."""
    if content is not None:
        (tmp_path / CALLBACK).write_text(content)
    assert not join_run(tmp_path, RolloutCaptureMixin(), object(), None)


def test_a_file_that_others_can_write_is_not_followed(tmp_path: Path) -> None:
    """Its socket would be trusted with the engine's process."""
    config = {"enable": True, "tool": "spans", "save_path": str(tmp_path)}
    engines = EngineProcesses(config)
    (tmp_path / CALLBACK).chmod(0o666)
    try:
        assert not join_run(tmp_path, RolloutCaptureMixin(), object(), None)
    finally:
        engines.close()
