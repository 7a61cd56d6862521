"""A plugin for verl: prints every step's metrics and the remote calls that its trainer made."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import ray.actor
from wrapt import register_post_import_hook

PREFIX = "COUNTED "
calls: Counter[str] = Counter()
_remote = ray.actor.ActorMethod._remote


@functools.wraps(_remote)
def counted_remote(self: Any, *args: Any, **kwargs: Any) -> Any:
    calls[self._method_name] += 1
    return _remote(self, *args, **kwargs)


def hook(module: Any) -> None:
    """Print what was counted whenever verl logs a step."""
    log = module.Tracking.log

    @functools.wraps(log)
    def counted_log(self: Any, data: Any, step: int, *args: Any, **kwargs: Any) -> None:
        numbers = {name: float(value) for name, value in data.items()}
        print(PREFIX + json.dumps({"step": step, "calls": calls, "metrics": numbers}), flush=True)
        calls.clear()
        log(self, data, step, *args, **kwargs)

    module.Tracking.log = counted_log


ray.actor.ActorMethod._remote = counted_remote
register_post_import_hook(hook, "verl.utils.tracking")
