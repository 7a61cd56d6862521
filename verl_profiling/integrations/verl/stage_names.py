"""The names of stages in runs of verl, by what verl calls or times.

A new stage of a method or timer that a table has is one row. Others are marked by a hook, see the
table of ``integrations/verl/__init__.py``.
"""

from __future__ import annotations

# Stage names of the controller by timer of verl, if the two names differ.
TRAINER_STAGES = {"adv": "advantage", "ref": "ref_log_prob", "testing": "validate"}

# The same for trainers whose steps are coroutines.
ASYNC_TRAINER_STAGES = {
    **TRAINER_STAGES,
    "gen": "wait:rollout",
    "timing_s/param_sync": "update_weights",
}

# Parts of the controller's start by method of its trainer.
START_PARTS = {
    "_init_tokenizer": "tokenizer",
    "_init_dataloader": "data",
    "_load_checkpoint": "load_checkpoint",
    "_validate": "validate",
}

# Stage names of the controller by function of TransferQueue.
TRANSFER_QUEUE_STAGES = {
    "kv_batch_get": "transfer_queue_get",
    "kv_batch_put": "transfer_queue_put",
    "kv_clear": "transfer_queue_clear",
    "kv_list": "transfer_queue_list",
}

# Stage names of the controller by method of `CheckpointEngineManager`: the parts of a weight
# update.
WEIGHT_SYNC_STAGES = {
    "abort_replicas": "abort",
    "sleep_replicas": "sleep",
    "release_kv_cache_replicas": "release_kv_cache",
    "build_process_group": "connect",
    "resume_kv_cache_replicas": "resume",
    "resume_generation_replicas": "resume",
}

# Stage names of a worker by attribute of `ActorRolloutRefWorker` and method: parts of its
# `update_weights`.
WORKER_SYNC_STAGES = {
    ("checkpoint_engine", "send_weights"): "transfer",
    ("rollout", "update_weights"): "transfer",
    ("rollout", "resume"): "resume",
}

_CHECKPOINTS = {name: name for name in ("save_checkpoint", "load_checkpoint")}

# Stage names by method of `ActorRolloutRefWorker`.
ACTOR_STAGES = {
    "compute_ref_log_prob": "ref_log_prob",
    "update_actor": "update_actor",
    "update_weights": "update_weights",
    **_CHECKPOINTS,
}

# Stage names by method of a critic's `TrainingWorker`.
CRITIC_STAGES = {"infer_batch": "values", "train_mini_batch": "update_critic", **_CHECKPOINTS}

# Keys of a batch, of which the first one names the task or the environment of a sequence; verl's
# own datasets have ``data_source``.
TASK_KEYS = ("task", "data_source")
ENVIRONMENT_KEYS = ("environment", "env_name", "env")

# Stage names by function of an engine's module; `{}` is `fsdp` or `megatron`.
OFFLOADING = {
    "load_{}_model_to_gpu": "load_model",
    "load_{}_optimizer": "load_optimizer",
    "offload_{}_model_to_cpu": "offload_model",
    "offload_{}_optimizer": "offload_optimizer",
}
