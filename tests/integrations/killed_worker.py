"""A plugin for verl: the training worker is killed in its second update."""

from __future__ import annotations

import os
import signal
from typing import Any

from wrapt import register_post_import_hook

updates = 0


def hook(module: Any) -> None:
    """Count updates, and have the second one kill the process."""
    update_actor = module.ActorRolloutRefWorker.update_actor

    def fatal_update(self: Any, data: Any) -> Any:
        global updates
        updates += 1
        if updates == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return update_actor(self, data)

    fatal_update.__dict__.update(vars(update_actor))
    module.ActorRolloutRefWorker.update_actor = fatal_update


register_post_import_hook(hook, "verl.workers.engine_workers")
