"""A store that fails at drawn moments, and a loop that uploads its run there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from verl_profiling import ProfilingCallback
from verl_profiling.capture.session import process_session
from verl_profiling.steps.check import check
from verl_profiling.workers import CaptureMixin


class FlakyStore(MemoryFileSystem):
    """Fails each call with a probability, until a number of failures;
    some uploads lose their last byte.
    """

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    draw = random.Random(0)
    share, left = 0.0, 0

    @classmethod
    def fails(cls) -> bool:
        """Return whether this call fails."""
        failed = cls.left > 0 and cls.draw.random() < cls.share
        cls.left -= failed
        return failed

    def put_file(self, lpath: Any, rpath: str, *args: Any, **kwargs: Any) -> None:
        if self.fails():
            raise PermissionError("the token has expired")
        super().put_file(lpath, rpath, *args, **kwargs)
        if self.fails():
            path = self._strip_protocol(rpath)
            self.pipe_file(path, self.cat_file(path)[:-1])

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self.fails():
            raise ConnectionError("no route to the store")
        return super().ls(path, *args, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode == "create" and self.fails():
            raise TimeoutError("no answer")
        super().pipe_file(path, value, mode=mode, **kwargs)


fsspec.register_implementation("flaky", FlakyStore, clobber=True)


def train_on_flaky_store(folder: Path, seed: int) -> dict[str, bool]:
    """Train with a store that fails; return whether the run arrived, or else was named as lost."""
    draw = FlakyStore.draw = random.Random(seed)
    FlakyStore.store.clear()
    FlakyStore.pseudo_dirs[:] = [""]
    FlakyStore.share, FlakyStore.left = draw.choice((0.1, 0.3, 0.6)), draw.choice((1, 5, 1_000))
    process_session().reset()
    config: dict[str, Any] = {
        "enable": True,
        "save_path": f"flaky://bucket{seed}/run",
        "tool": "spans",
        "remote": {"staging": str(folder / "staging"), "retry_s": 2},
        "timeouts": {"start_s": 5, "finish_s": 10},
    }
    worker = CaptureMixin()
    worker.init_capture(config, role="actor")
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", worker)
        for step in range(1, 4):
            callback.on_step_begin(step)
            callback.on_step_end({"loss": 0.5})
    FlakyStore.left = 0
    store, path = fsspec.core.url_to_fs(config["save_path"])
    store.get(path, str(folder / "copy"), recursive=True)
    runs = [path.parent for path in (folder / "copy").rglob("run.json")]
    waits = [path.name for path in (folder / "staging").rglob("*") if path.is_file()]
    arrived = len(runs) == 1 and check(runs[0]).ok and len(list(runs[0].glob("step_*"))) == 3
    return {"arrived": arrived, "named": bool(waits) or any(not check(run).ok for run in runs)}
