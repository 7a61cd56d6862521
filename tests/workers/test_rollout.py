"""The rollout mixins, where no engine is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_loops import request

from verl_profiling.errors import CaptureStateError, ConfigError, ToolUnavailableError
from verl_profiling.workers import RolloutCaptureMixin, SGLangCaptureMixin, VLLMCaptureMixin

MIXINS = [RolloutCaptureMixin, VLLMCaptureMixin, SGLangCaptureMixin]


@pytest.mark.parametrize("mixin", MIXINS)
async def test_other_nodes_of_a_replica_do_nothing(mixin: type[Any], tmp_path: Path) -> None:
    """Node 1 has no engine to drive: it answers `skipped`, makes no folder,
    and stops without a word.
    """
    server = mixin()
    server.init_capture({"enable": True}, engine=None, replica=2, node_rank=1)
    reply = await server.start_capture(request(tmp_path))
    assert (reply.status, reply.identity.name, reply.identity.node_rank) == (
        "skipped",
        "rollout2",
        1,
    )
    assert "node 0 records for all" in reply.reason
    assert (await server.stop_capture("run-1")).result.status == "skipped"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mixin", MIXINS)
@pytest.mark.parametrize("config", [None, {}, {"enable": False}])
async def test_nothing_is_set_up_when_profiling_is_off(
    mixin: type[Any], config: Any, tmp_path: Path
) -> None:
    """Disabled, the engine is not looked at and every call answers `skipped`."""
    server = mixin()
    server.init_capture(config, engine=object())
    assert (await server.start_capture(request(tmp_path))).status == "skipped"
    assert (await server.stop_capture()).result.reason.startswith("switched off for role rollout")
    assert mixin.engine_args(config) == {}


async def test_start_before_init_names_the_remedy(tmp_path: Path) -> None:
    """A server that was not set up says what to call; stopping it is harmless."""

    class Server(RolloutCaptureMixin):
        pass

    with pytest.raises(
        CaptureStateError, match=r"step=1\): Server is not set up; call init_capture"
    ):
        await Server().start_capture(request(tmp_path))
    assert (await Server().stop_capture()).result.status == "skipped"


def test_an_engine_that_cannot_be_recorded_is_refused() -> None:
    """An unknown one by class and replica, an old one with what to install;
    nothing of it is called.
    """
    with pytest.raises(
        ToolUnavailableError, match=r"builtins\.object \(rollout replica 3 .*AsyncLLM"
    ):
        RolloutCaptureMixin().init_capture({"enable": True}, engine=object(), replica=3)

    class Engine:
        tokenizer_manager = object()

    with pytest.raises(ToolUnavailableError, match=r"no start_profile; install sglang>=0\.5\.3"):
        SGLangCaptureMixin().init_capture({"enable": True}, engine=Engine())


def test_engine_args_asks_which_engine() -> None:
    """A mixin for any engine does not guess; an unknown name lists the choices."""
    with pytest.raises(ConfigError, match="choose from: sglang, transformers, vllm"):
        RolloutCaptureMixin.engine_args({"enable": True})
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        RolloutCaptureMixin.engine_args({"enable": True}, engine="vlm")
    assert RolloutCaptureMixin.engine_args({"enable": True}, engine="sglang") == {}
    assert SGLangCaptureMixin.engine_args({"enable": True}) == {}
