"""Profile a bare SGLang engine: no training loop, no Ray."""

import asyncio
import sys

import sglang

from recipes.rollout_only.batch import capture_batch
from verl_profiling.workers import SGLangCaptureMixin

PROFILING = {
    "enable": True,
    "save_path": "outputs/rollout_only",
    "watch": {"enable": True},
    "rollout": {"count": 20},
}


class Server(SGLangCaptureMixin):
    """An engine, and what the callback calls."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        options = dict(argument.split("=", 1) for argument in arguments)
        self.engine = sglang.Engine(model_path=model, log_level="warning", **options)
        self.init_capture(PROFILING)

    async def generate(self, prompt: str, tokens: int) -> None:
        """Serve one request."""
        await self.engine.async_generate(prompt, {"max_new_tokens": tokens, "ignore_eos": True})


async def main(model: str, *arguments: str) -> None:
    """Start an engine, capture, and end it."""
    server = Server(model, list(arguments))
    await capture_batch(server, PROFILING)
    server.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
