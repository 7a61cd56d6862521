"""One SGLang replica over two nodes: each node's own processes, on one machine."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.contract import spans
from tests.engines.server import SGLANG_ON_CPU
from verl_profiling.files.run_files import read_manifest

pytest.importorskip(
    "sglang", reason="SGLang is not installed; make test-sglang builds its environment"
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(580)]

NODE_SCRIPT = """
import asyncio, json, logging, sys, time
from pathlib import Path
from verl_profiling import AsyncProfilingCallback
from verl_profiling.capture.protocol import CaptureStart
from verl_profiling.workers import SGLangCaptureMixin

class Server(SGLangCaptureMixin):
    pass

async def capture(server, profiling):
    callback = AsyncProfilingCallback(profiling)
    callback.add_rollout(server)
    await callback.on_train_begin()
    for step in (1, 2):
        await callback.on_step_begin(step)
        await server.engine.async_generate(
            input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 6, "ignore_eos": True}
        )
        await callback.on_step_end()
    await callback.on_train_end()

async def be_asked(server, folder):
    replies = []
    for step in (1, 2):
        order = CaptureStart(capture_id=str(step), run_id="r", step=step,
                               folder=str(folder / "of_node_1"))
        replies.append((await server.start_capture(order)).status)
        replies.append((await server.stop_capture(order.capture_id)).result.status)
    return replies

def main():
    from sglang.srt.entrypoints.engine import Engine

    node, folder, options = int(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("verl_profiling").addHandler(handler)
    logging.getLogger("verl_profiling").setLevel(logging.DEBUG)
    server = Server()
    server.engine = Engine(node_rank=node, **options)
    profiling = {"enable": True, "save_path": str(folder)}
    server.init_capture(profiling)
    done = folder / "done"
    if node:
        replies = asyncio.run(be_asked(server, folder))
        (folder / "node1.json").write_text(json.dumps({"replies": replies, "lines": lines}))
        while not done.exists():
            time.sleep(0.2)
    else:
        server.engine.loop.run_until_complete(capture(server, profiling))
        done.touch()
    server.engine.shutdown()

if __name__ == "__main__":
    main()
"""


def test_the_first_node_records_for_all_and_the_others_are_silent(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Two steps, two ranks on two nodes: node 0 has both traces; node 1 skips,
    writes and logs nothing.
    """
    script = tmp_path / "node.py"
    script.write_text(NODE_SCRIPT)
    port = random.randrange(20000, 30000)
    options = {
        **SGLANG_ON_CPU,
        "model_path": str(tiny_model),
        "skip_tokenizer_init": True,
        "tp_size": 2,
        "nnodes": 2,
        "dist_init_addr": f"127.0.0.1:{port}",
    }
    environment = {
        **os.environ,
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",
    }
    nodes = []
    for node in (0, 1):
        arguments = json.dumps({**options, "port": port + 1000 * (node + 1)})
        with (tmp_path / f"log{node}").open("w") as log:
            nodes.append(
                subprocess.Popen(
                    [sys.executable, script, str(node), tmp_path, arguments],
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
            )
    try:
        for node in nodes:
            node.wait(500)
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
    logs = [(tmp_path / f"log{node}").read_text()[-3000:] for node in (0, 1)]
    assert (tmp_path / "done").exists(), logs
    for step in (1, 2):
        folder = tmp_path / f"step_{step:06d}"
        for rank in (0, 1):
            names = [span["name"] for span in spans(folder / f"rollout0_rank{rank}.torch.json.gz")]
            assert names.count("aten::embedding") >= 6
        [worker] = read_manifest(folder).workers
        assert [artifact.status for artifact in worker.artifacts] == ["ok", "ok"]
    assert json.loads((tmp_path / "node1.json").read_text()) == {
        "replies": ["skipped"] * 4,
        "lines": [],
    }
    assert not (tmp_path / "of_node_1").exists()
