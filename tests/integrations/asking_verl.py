"""A plugin for verl: somebody asks a run for captures while it validates or saves;
something becomes slow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

REQUESTS = "ASKING_VERL_REQUESTS"
"""JSON: arguments of `trigger` by ``validation`` or ``checkpoint`` and step, and ``folder``:
where to ask.
"""
SLOW = "ASKING_VERL_SLOW"
"""JSON: ``rank`` of the actor, ``first`` update that is slow, and how many ``seconds`` longer that
takes, or how many ``times`` as long, if that is more: other work may make all of it slow."""
ANSWERS = "asked.jsonl"

updates = 0


def ask(when: str, step: int) -> None:
    """Run the command, if somebody asks then; keep what it said."""
    requests = json.loads(os.environ.get(REQUESTS, "{}"))
    arguments = requests.get(when, {}).get(str(step))
    if arguments is None:
        return
    folder = Path(requests["folder"])
    command = [sys.executable, "-m", "verl_profiling.cli", "trigger", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    with (folder / ANSWERS).open("a") as file:
        said = {"code": done.returncode, "said": done.stdout + done.stderr}
        file.write(json.dumps({"when": when, "step": step, **said}) + "\n")


def asking_in_validation(module: Any) -> None:
    """Have somebody ask before the trainer sends out what it validates by."""
    validate = module.PPOTrainer._validate

    def validated(self: Any, *args: Any, **kwargs: Any) -> Any:
        ask("validation", self.global_steps)
        return validate(self, *args, **kwargs)

    module.PPOTrainer._validate = validated


def asking_in_checkpoints(module: Any) -> None:
    """Have somebody ask while rank 0 writes its checkpoint; slow down updates of one rank."""
    save = module.ActorRolloutRefWorker.save_checkpoint
    train: Callable[..., Any] = module.TrainingWorker.train_mini_batch

    def saved(
        self: Any,
        local_path: str,
        hdfs_path: Any = None,
        global_step: int = 0,
        max_ckpt_to_keep: Any = None,
    ) -> Any:
        if self.rank == 0:
            ask("checkpoint", global_step)
        return save(self, local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def trained(self: Any, data: Any) -> Any:
        global updates
        updates += 1
        begin_s = time.monotonic()
        output = train(self, data)
        took_s = time.monotonic() - begin_s
        slow = json.loads(os.environ.get(SLOW, "{}"))
        if slow and self.rank == slow["rank"] and updates >= slow["first"]:
            time.sleep(max(slow["seconds"], slow["times"] * took_s))
        return output

    for original, replacement in ((save, saved), (train, trained)):
        replacement.__dict__.update(vars(original))
    module.ActorRolloutRefWorker.save_checkpoint = saved
    module.TrainingWorker.train_mini_batch = trained


if {REQUESTS, SLOW} & os.environ.keys():  # a run, not the tests that start it
    register_post_import_hook(asking_in_validation, "verl.trainer.ppo.v1.trainer_base")
    register_post_import_hook(asking_in_checkpoints, "verl.workers.engine_workers")
