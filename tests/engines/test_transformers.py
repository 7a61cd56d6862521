"""A transformers model, which computes in the process of its server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.contract import EngineContract, finished, request, spans, stop
from verl_profiling.capture.session import stage
from verl_profiling.engines.transformers import watch_transformers
from verl_profiling.errors import ConfigError
from verl_profiling.watch.process_sums import Busy, StageSums
from verl_profiling.workers import CaptureMixin, RequestLog, RolloutCaptureMixin

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
    """One process is recorded once: the second role joins,
    and one stop ends the capture for both.
    """
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
    """In discrete mode the process is the trainer's: the window is skipped,
    and a marked rollout recorded.
    """
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
    """Nothing counts iterations in this process,
    so asking for it is an error that names the key.
    """
    with pytest.raises(
        ConfigError, match=r"rollout\.count: rollout replica 0 .* computes in this process"
    ):
        server.reconfigure(rollout={"count": 3})


@pytest.fixture
def logged(tiny_model: Path) -> tuple[Any, RequestLog]:
    """A model, and the open log of its requests."""
    model, log = transformers.AutoModelForCausalLM.from_pretrained(tiny_model).eval(), RequestLog()
    log.serve(0, enable=True)
    log.begin(None)
    watch_transformers(model, log)
    return model, log


def lengths(log: RequestLog) -> list[tuple[int, int, bool]]:
    return [(one.prompt_tokens, one.response_tokens, one.failed) for one in log.end()]


def test_each_sequence_has_the_length_of_its_own_prompt(logged: tuple[Any, RequestLog]) -> None:
    """A prompt's sequences follow each other."""
    model, log = logged
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    prompts = {"input_ids": torch.full((2, 3), 5), "attention_mask": mask}
    model.generate(
        **prompts, num_return_sequences=2, do_sample=True, max_new_tokens=2, min_new_tokens=2
    )
    assert lengths(log) == [(2, 2, False), (2, 2, False), (3, 2, False), (3, 2, False)]


def test_a_request_of_the_watch_is_a_sequence(logged: tuple[Any, RequestLog]) -> None:
    """Of whatever call, whether a capture is open or not: as in captures, and as engines count."""
    model, log = logged
    sums = StageSums(10)
    log.busy = Busy(sums, "generate")
    new, made = {"do_sample": True, "max_new_tokens": 1}, 0
    for prompts, samples in ((1, 1), (2, 3), (5, 1), (3, 2)):
        model.generate(torch.full((prompts, 3), 5), num_return_sequences=samples, **new)
        made += prompts * samples
    assert len(log.end()) == made
    model.generate(torch.full((4, 3), 5), return_dict_in_generate=True, **new)
    [[total]] = sums.spans.of_steps([(0, 1 << 62)], 0)
    assert (total.name, total.runs) == ("generate", made + 4)


def test_prompts_may_be_embeddings(logged: tuple[Any, RequestLog]) -> None:
    """Also in a call that fails, whose error is the model's own."""
    model, log = logged
    prompts, new = torch.zeros((2, 3, 128)), {"max_new_tokens": 2, "min_new_tokens": 2}
    model.generate(inputs_embeds=prompts, do_sample=False, suppress_tokens=[0], **new)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(inputs_embeds=prompts, **new)
    assert lengths(log) == [(3, 2, False), (3, 2, False), (3, 0, True), (3, 0, True)]


@pytest.mark.parametrize(("padding", "kept"), [(0, [3, 2]), (2, [3, 2]), (None, [3, 2])])
def test_the_token_that_ends_a_text_is_no_padding(
    logged: tuple[Any, RequestLog], padding: int | None, kept: list[int]
) -> None:
    """Also if both are one token, or the tokenizer has no padding;
    lengths are those of other engines.
    """
    model, log = logged
    model.generation_config.pad_token_id = None
    texts = torch.tensor([[7, 8, 9], [7, 2, 9]])

    def forced(ids: Any, scores: Any) -> Any:
        scores = torch.full_like(scores, -1e9)
        scores[torch.arange(2), texts[:, ids.shape[1] - 4]] = 0.0
        return scores

    config = transformers.GenerationConfig(pad_token_id=padding, eos_token_id=2, max_new_tokens=3)
    prompts = torch.full((2, 4), 5)
    processors = transformers.LogitsProcessorList([forced])
    model.generate(prompts, generation_config=config, logits_processor=processors)
    config.eos_token_id = config.pad_token_id = None
    ids = {"eos_token_id": torch.tensor([2]), "pad_token_id": padding}
    model.generate(prompts, generation_config=config, logits_processor=processors, **ids)
    assert [response for _, response, _ in lengths(log)] == [*kept, *kept]
