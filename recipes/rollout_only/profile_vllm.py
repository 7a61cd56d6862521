"""Profile a bare vLLM engine: no training loop, no Ray, one capture around one batch of requests."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from verl_profiling import AsyncProfilingCallback
from verl_profiling.workers import VLLMCaptureMixin

PROFILING = {"enable": True, "save_path": "outputs/rollout_only", "rollout": {"count": 20}}


class Server(VLLMCaptureMixin):
    """An engine, and what the callback calls."""

    def __init__(self, model: str) -> None:
        arguments = AsyncEngineArgs(model=model, enforce_eager=True, **self.engine_args(PROFILING))
        self.engine = AsyncLLM.from_engine_args(arguments)
        self.init_capture(PROFILING)

    async def generate(self, prompt: str, number: int) -> None:
        """Serve one request; lengths differ, to show a tail."""
        sampling = SamplingParams(max_tokens=8 * (number + 1), ignore_eos=True)
        async for _ in self.engine.generate(prompt, sampling, request_id=str(number)):
            pass


async def main(model: str) -> None:
    """Capture eight requests as step 1."""
    server = Server(model)
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
    asyncio.run(main(sys.argv[1]))
