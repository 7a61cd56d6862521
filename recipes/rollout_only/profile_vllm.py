"""Profile a bare vLLM engine: no training loop, no Ray,
one capture around one batch of requests.
"""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from recipes.rollout_only.batch import capture_batch
from verl_profiling.workers import VLLMCaptureMixin

PROFILING = {
    "enable": True,
    "save_path": "outputs/rollout_only",
    "watch": {"enable": True},
    "rollout": {"count": 20},
}


class Server(VLLMCaptureMixin):
    """An engine, and what the callback calls."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        options = dict(argument.split("=", 1) for argument in arguments)
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model, enforce_eager=True, **options, **self.engine_args(PROFILING)
            )
        )
        self.init_capture(PROFILING)

    async def generate(self, prompt: str, tokens: int) -> None:
        """Serve one request."""
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for _ in self.engine.generate(prompt, sampling, request_id=str(tokens)):
            pass


async def main(model: str, *arguments: str) -> None:
    """Start an engine, capture, and end it."""
    server = Server(model, list(arguments))
    await capture_batch(server, PROFILING)
    server.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
