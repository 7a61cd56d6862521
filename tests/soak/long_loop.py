"""A loop of thousands of steps with captures: ``python -m tests.soak.long_loop
FOLDER STEPS CAPTURES``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from verl_profiling import ProfilingCallback, stage
from verl_profiling.steps.check import check
from verl_profiling.workers import CaptureMixin


def main(folder: str, steps: str, captures: str) -> None:
    """Train; print what the second half of the steps added, and what ``check`` says."""
    count, every = int(steps), int(steps) // int(captures)
    config: dict[str, Any] = {
        "enable": True,
        "save_path": folder,
        "tool": "spans",
        "watch": {"enable": True},
    }
    config["schedule"] = {"steps": list(range(every, count + 1, every))}
    config["limits"] = {"keep_last": int(captures) // 2}
    worker, process, samples = CaptureMixin(), psutil.Process(), []
    worker.init_capture(config, role="actor")
    begin = time.monotonic()
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", worker)
        for step in range(1, count + 1):
            callback.on_step_begin(step)
            callback.on_rollout_begin()
            callback.on_rollout_end()
            with callback.stage("update"), stage("update_actor"):
                pass
            callback.on_step_end({"loss": 1 / step})
            if step % (count // 10) == 0:
                gc.collect()
                samples.append(
                    (process.memory_info().rss, process.num_fds(), process.num_threads())
                )
    checked = check(Path(folder))
    grown = [
        late - middle for late, middle in zip(samples[-1], samples[len(samples) // 2], strict=True)
    ]
    result = {"rss_bytes": grown[0], "descriptors": grown[1], "threads": grown[2], "ok": checked.ok}
    result |= {
        "captured": len(list(Path(folder).glob("step_*"))),
        "seconds": time.monotonic() - begin,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
