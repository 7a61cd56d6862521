"""A transformers model, which computes in the process of its server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import EngineContract, finished, request, spans, stop
from verl_profiling.capture.session import process_session, stage
from verl_profiling.errors import ConfigError
from verl_profiling.workers import CaptureMixin, RolloutCaptureMixin

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


class Server(RolloutCaptureMixin):
    """What a user writes, plus the helpers of the contract."""

    too_long_message = "too long"

    def __init__(self, model: Path, save_path: Path) -> None:
        self.save_path = save_path
        self.engine = transformers.AutoModelForCausalLM.from_pretrained(model).eval()

    def reconfigure(self, **changes: Any) -> None:
        self.init_capture({"enable": True, "save_path": str(self.save_path), **changes})

    async def generate(self, requests: int, tokens: int) -> int:
        prompts = torch.full((requests, 4), 5)
        output = self.engine.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )
        return int(output[:, 4:].numel())

    async def generate_too_long(self) -> None:
        def refuse(*_: Any) -> None:
            raise ValueError("too long")

        handle = self.engine.register_forward_pre_hook(refuse)
        try:
            await self.generate(1, 1)
        finally:
            handle.remove()

    @staticmethod
    def iterations(path: Path) -> int:
        """Count lookups of token embeddings: one for each forward pass."""
        return sum(event["name"] == "aten::embedding" for event in spans(path))


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return Server(tiny_model, tmp_path_factory.mktemp("save"))


class TestTransformers(EngineContract):
    """The contract, recorded by the session of this process."""

    streams = False


async def test_a_trainer_in_the_same_process_joins(server: Server, tmp_path: Path) -> None:
    """One process is recorded once: the second role joins, and one stop ends the capture for both."""
    server.reconfigure()
    trainer = CaptureMixin()
    trainer.init_capture({"enable": True, "save_path": str(tmp_path)}, role="actor")
    order = request(tmp_path)
    assert trainer.start_capture(order).status == "recording"
    assert (await server.start_capture(order)).status == "joined"
    await server.generate(1, 2)
    result = await stop(server, order.capture_id)
    assert result.roles == ["actor", "rollout"]
    assert len(result.requests) == 1
    again = trainer.stop_capture(order.capture_id)
    assert again.result.capture_id == order.capture_id
    [artifact] = await finished(server, result)
    assert (artifact.path, artifact.status) == ("actor_rank0.torch.json.gz", "ok")


async def test_a_trainer_that_records_by_stage_records_the_rollout_too(
    server: Server, tmp_path: Path
) -> None:
    """In discrete mode the process is the trainer's: the window is skipped, and a marked rollout recorded."""
    config = {"enable": True, "save_path": str(tmp_path), "mode": "discrete"}
    server.reconfigure(mode="discrete")
    trainer = CaptureMixin()
    trainer.init_capture(config, role="actor")
    order = request(tmp_path)
    assert trainer.start_capture(order).status == "armed"
    window = request(tmp_path, stage="rollout")
    reply = await server.start_capture(window)
    assert (reply.status, "stage('rollout')" in reply.reason) == ("skipped", True)
    with stage("rollout"):
        await server.generate(1, 2)
    assert (await stop(server, window.capture_id)).status == "skipped"
    result = trainer.stop_capture(order.capture_id, 30).result
    assert [artifact.path for artifact in result.artifacts] == ["actor_rank0.rollout.torch.json.gz"]
    again = await server.start_capture(request(tmp_path, 2, stage="rollout"))
    assert again.status == "recording"
    await stop(server)


def test_a_window_in_iterations_is_refused(server: Server) -> None:
    """Nothing counts iterations in this process, so asking for it is an error that names the key."""
    with pytest.raises(ConfigError, match=r"rollout\.count: rollout replica 0 .* computes in this process"):
        server.reconfigure(rollout={"count": 3})


def test_lengths_leave_out_padding(server: Server, tmp_path: Path) -> None:
    """Prompt lengths follow the attention mask, response lengths end before the padding."""
    from verl_profiling.engines.request_log import _length

    assert _length(torch.tensor([7, 8, 0, 0]), 0) == 2
    assert _length(torch.tensor([0, 0]), 0) == 0
    assert _length(torch.tensor([7, 0, 8]), 0) == 3
    assert _length(torch.tensor([7, 0, 8]), None) == 3
    process_session().reset()
