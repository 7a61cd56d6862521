"""The rollout: one process per replica, each with its own inference engine."""

import asyncio
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from omegaconf import DictConfig

from recipes.grpo_tiny.model import build_model
from verl_profiling import stage
from verl_profiling.integrations.tiny_grpo import END, RESPONSE_LENGTH, Rows, until_end
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

Weights = dict[str, torch.Tensor]


class Engine(Protocol):
    """The interface of the recipe's engines.

    Attributes:
        handle: The object that the mixin captures.
        requests: The log of an engine that notes its requests itself; others are watched.
    """

    handle: Any
    requests: RequestLog | None = None

    async def generate(self, prompts: Rows) -> Rows:
        """Return one sampled response per prompt, ``END`` included."""

    async def complete(self, prompt: list[int], request_id: str) -> list[int]:
        """Return one sampled response; the engine knows the request by its id, if it knows ids."""

    async def load_weights(self, weights: Weights) -> None:
        """Replace the weights."""


class TransformersEngine(Engine):
    """``model.generate`` in this process: nothing to install, and good enough for a toy."""

    def __init__(self, config: DictConfig, seed: int, engine_args: dict[str, Any]) -> None:
        self.device = "cuda" if config.gpus else "cpu"
        self.handle = build_model(config.model, config.seed).to(self.device).eval()
        self.requests = RequestLog()
        self._turn = asyncio.Lock()
        torch.manual_seed(seed)

    async def generate(self, prompts: Rows) -> Rows:
        """Sample a batch."""
        with self.requests.open() as batch:
            responses = self._sample(prompts)
            for prompt, response in zip(prompts, responses, strict=True):
                batch.close(len(prompt), len(response))
        return responses

    async def complete(self, prompt: list[int], request_id: str) -> list[int]:
        """Sample one response, when those before it are done."""
        with self.requests.open(len(prompt), id=request_id) as request:
            request.arrival_ns = time.time_ns()
            async with self._turn:
                request.scheduled_ns = time.time_ns()
                [response] = self._sample([prompt])
            request.response_tokens = len(response)
        return response

    def _sample(self, prompts: Rows) -> Rows:
        """Sample on this thread, the one that a capture records."""
        tokens = torch.tensor(prompts, device=self.device)
        sampled = self.handle.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=RESPONSE_LENGTH,
            do_sample=True,
            top_k=0,
        )
        return list(map(until_end, sampled[:, tokens.shape[1] :].tolist()))

    async def load_weights(self, weights: Weights) -> None:
        """Copy them in."""
        self.handle.load_state_dict(weights)


class VLLMEngine(Engine):
    """vLLM's ``AsyncLLM``, whose engine core and workers are separate processes."""

    def __init__(self, config: DictConfig, seed: int, engine_args: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._folder = tempfile.TemporaryDirectory(prefix="grpo_tiny_")
        build_model(config.model, config.seed).save_pretrained(self._folder.name)
        self.handle = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self._folder.name,
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                max_model_len=32,
                seed=seed,
                use_tqdm_on_load=False,
                **engine_args,
            )
        )
        self._sampling = SamplingParams(max_tokens=RESPONSE_LENGTH, detokenize=False)
        self._request_ids = map(str, itertools.count())

    async def generate(self, prompts: Rows) -> Rows:
        """Send every prompt at once; the engine batches them."""
        return await asyncio.gather(*map(self.complete, prompts, self._request_ids))

    async def complete(self, prompt: list[int], request_id: str) -> list[int]:
        """Send one prompt."""
        request = self.handle.generate({"prompt_token_ids": prompt}, self._sampling, request_id)
        async for output in request:
            response = output.outputs[0].token_ids
        return list(response)

    async def load_weights(self, weights: Weights) -> None:
        """Write a checkpoint and let the engine's workers read it."""
        from safetensors.torch import save_file

        save_file(weights, Path(self._folder.name, "model.safetensors"))
        await self.handle.collective_rpc(
            "reload_weights", kwargs={"weights_path": self._folder.name}
        )
        await self.handle.reset_prefix_cache()


class SGLangEngine(Engine):
    """SGLang's ``Engine``, whose schedulers are separate processes."""

    def __init__(self, config: DictConfig, seed: int, engine_args: dict[str, Any]) -> None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        import sglang

        self._folder = tempfile.TemporaryDirectory(prefix="grpo_tiny_")
        build_model(config.model, config.seed).save_pretrained(self._folder.name)
        self.handle = sglang.Engine(
            model_path=self._folder.name,
            skip_tokenizer_init=True,
            device="cuda" if config.gpus else "cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            disable_radix_cache=True,
            max_total_tokens=8192,
            mem_fraction_static=0.3,
            random_seed=seed,
            log_level="warning",
            **engine_args,
        )
        self._sampling = {"max_new_tokens": RESPONSE_LENGTH, "stop_token_ids": [END]}

    async def generate(self, prompts: Rows) -> Rows:
        """Send every prompt at once; the engine batches them."""
        responses = await self.handle.async_generate(
            input_ids=prompts, sampling_params=self._sampling
        )
        return [list(response["output_ids"]) for response in responses]

    async def complete(self, prompt: list[int], request_id: str) -> list[int]:
        """Send one prompt."""
        response = await self.handle.async_generate(
            input_ids=prompt, sampling_params=self._sampling, rid=request_id
        )
        return list(response["output_ids"])

    async def load_weights(self, weights: Weights) -> None:
        """Write a checkpoint and let the engine read it."""
        from safetensors.torch import save_file
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        save_file(weights, Path(self._folder.name, "model.safetensors"), {"format": "pt"})
        request = UpdateWeightFromDiskReqInput(model_path=self._folder.name)
        await self.handle.tokenizer_manager.update_weights_from_disk(request, None)


ENGINES: dict[str, type[Engine]] = {
    "transformers": TransformersEngine,
    "vllm": VLLMEngine,
    "sglang": SGLangEngine,
}


class RolloutServer(RolloutCaptureMixin):
    """One replica. The mixin adds what the profiling callback calls."""

    def __init__(self, config: DictConfig, replica: int) -> None:
        self.config = config
        self.replica = replica
        self.batches = 0

    async def start(self) -> None:
        """Start the engine, inside the actor's event loop."""
        rollout = self.config.rollout
        self.engine = ENGINES[rollout.engine](
            self.config,
            self.config.seed + self.replica,
            self.engine_args(self.config.profiling, engine=rollout.engine),
        )
        self.init_capture(
            self.config.profiling,
            replica=self.replica,
            engine=self.engine.handle,
            requests=self.engine.requests,
        )

    @stage("rollout")
    async def generate(self, prompts: Rows) -> Rows:
        """Return one sampled response per prompt."""
        fault = self.config.fault
        self.batches += 1
        if self.replica == fault.replica and self.batches >= fault.step:
            await asyncio.sleep(fault.seconds)
        return await self.engine.generate(prompts)

    async def complete(self, prompt: list[int], request_id: str) -> list[int]:
        """Return one sampled response to one prompt, of many that are asked for at once."""
        return await self.engine.complete(prompt, request_id)

    @stage("update_weights")
    async def load_weights(self, weights: Weights) -> None:
        """Replace the engine's weights."""
        await self.engine.load_weights(weights)
