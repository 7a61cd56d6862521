"""CPU platform for verl 0.9, as a plugin: verl itself is not edited.

``VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=recipes.verl_grpo_cpu.cpu_platform`` makes every
process of a run use it. It is a way to try verl (and this package) without an accelerator; it is
not fast, and not meant to be.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry
from wrapt import register_post_import_hook

from recipes.verl_grpo_cpu import cpu_device


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """One CPU as the only accelerator of a process, gloo for communication."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return cpu_device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        # verl moves tensors to what this returns, and `tensor.to(0)` would mean cuda:0.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        with torch.profiler.record_function(msg):
            yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        # `ray.init(num_gpus=1)` declares a GPU on a machine that has none.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def _gloo_once(init_process_group: Any) -> Any:
    """Wrap ``init_process_group``: verl asks for ``cpu:gloo,<device>:<backend>``,
    twice the CPU here.
    """

    @functools.wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    return init


dist.init_process_group = dist.distributed_c10d.init_process_group = _gloo_once(
    dist.init_process_group
)


def _keep_weights(module: ModuleType) -> None:
    """Make vLLM's linear layers compute with their own weights.

    On CPU vLLM packs a copy and drops the weights, after which verl could not load new ones.
    """

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = dispatch


def _do_not_pin(module: ModuleType) -> None:
    """Keep FSDP2 from pinning parameters on the CPU;
    pinned memory is for copies to an accelerator.
    """
    policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory: policy(pin_memory=False)


def _plain_attention(module: ModuleType) -> None:
    """Load critics with torch's attention; verl asks for flash attention,
    which has no CPU version.
    """

    def load_valuehead_model(
        local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
    ) -> torch.nn.Module:
        from transformers import AutoModelForTokenClassification

        model: torch.nn.Module = AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )
        return model

    module.load_valuehead_model = load_valuehead_model


def _share_by_name(module: ModuleType) -> None:
    """Send new weights to SGLang through shared memory instead of handles of an accelerator's
    memory.

    The memory has a name, because engine and trainer have no common parent to inherit it from.
    """
    module.monkey_patch_torch_reductions = functools.partial(
        torch.multiprocessing.set_sharing_strategy, "file_system"
    )


register_post_import_hook(_plain_attention, "verl.utils.model")
register_post_import_hook(_keep_weights, "vllm.model_executor.layers.utils")
register_post_import_hook(_share_by_name, "sglang.srt.utils.patch_torch")
register_post_import_hook(_do_not_pin, "verl.utils.fsdp_utils")

# verl registers its FSDP engine for "cuda" and "npu" only; it runs on any torch device.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
