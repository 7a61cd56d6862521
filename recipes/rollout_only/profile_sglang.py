"""Profile a bare SGLang engine, prefill and decode apart: no training loop, no Ray."""

import asyncio
import sys

import sglang

from verl_profiling import AsyncProfilingCallback
from verl_profiling.workers import SGLangCaptureMixin

PROFILING = {
    "enable": True,
    "save_path": "outputs/rollout_only",
    "rollout": {"count": 10, "by_stage": True},
}


class Server(SGLangCaptureMixin):
    """An engine, and what the callback calls."""

    def __init__(self, model: str, arguments: list[str]) -> None:
        options = dict(argument.split("=", 1) for argument in arguments)
        self.engine = sglang.Engine(model_path=model, log_level="warning", **options)
        self.init_capture(PROFILING)

    async def generate(self, prompt: str, number: int) -> None:
        """Serve one request; lengths differ, to show a tail."""
        sampling = {"max_new_tokens": 8 * (number + 1), "ignore_eos": True}
        await self.engine.async_generate(prompt, sampling)


async def main(model: str, *arguments: str) -> None:
    """Capture eight requests as step 1."""
    server = Server(model, list(arguments))
    callback = AsyncProfilingCallback(PROFILING)
    callback.add_rollout(server)
    await callback.on_train_begin()
    await callback.on_step_begin(1)
    await asyncio.gather(*[server.generate("Count down from ten:", number) for number in range(8)])
    await callback.on_step_end()
    await callback.on_train_end()
    print(f"verl-profiling report {callback.last_folder}")
    server.engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
