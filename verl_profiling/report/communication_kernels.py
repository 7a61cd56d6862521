"""Recognises communication kernels, by a table that the documentation prints, and their process groups.

A pattern is looked for in the kernel's own name: without the types of its template and of its
parameters, because a kernel that takes a communicator's types need not communicate. Only NCCL's
is looked for in all of it, as HolisticTraceAnalysis does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from verl_profiling.errors import ConfigError
from verl_profiling.timeline.trace import UNDECODABLE


class Pattern(NamedTuple):
    """Names of the kernels of one library.

    Attributes:
        library: Whose they are.
        pattern: Regular expression that is searched for in a name.
        example: One of the names.
        source: Where they are defined.
    """

    library: str
    pattern: str
    example: str
    source: str


_GITHUB = "https://github.com/"
_COLLECTIVE = (
    r"(?:All|(?<![A-Za-z])(?:all|ALL))_?(?:[Rr]educe|REDUCE|[Gg]ather|GATHER|[Tt]o_?[Aa]ll|TO_?ALL|2[Aa]ll)"
    r"|[Rr]educe_?[Ss]catter"
)

NCCL = Pattern(
    "NCCL, RCCL",
    r"(?i:nccl)",
    "ncclDevKernel_AllGather_RING_LL",
    _GITHUB + "NVIDIA/nccl/tree/master/src/device",
)
PATTERNS = (
    NCCL,
    Pattern(
        "any: the name of a collective",
        _COLLECTIVE,
        "twoShotAllReduceKernel",
        _GITHUB + "flashinfer-ai/flashinfer/tree/main/include/flashinfer/comm",
    ),
    Pattern(
        "RCCL with MSCCL",
        r"mscclKernel_|rcclGenericKernel",
        "mscclKernel_Sum_half_LL_false",
        _GITHUB + "ROCm/rccl/blob/develop/src/include/msccl/msccl_kernel.h",
    ),
    Pattern("HCCL", r"^hccl|^hcom_", "hcom_allReduce_", _GITHUB + "kali20gakki/msprof"),
    Pattern("oneCCL", r"\boneccl_", "oneccl_reduce_base", _GITHUB + "intel/torch-xpu-ops/issues/5384"),
    Pattern(
        "torch, symmetric memory",
        r"\bmultimem_|symmetric_memory::|\b(?:put|wait)_signal_kernel",
        "multimem_all_reduce_kernel",
        _GITHUB + "pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu",
    ),
    Pattern(
        "vLLM, SGLang, aiter: custom all-reduce",
        r"cross_device_reduce",
        "vllm::cross_device_reduce_2stage",
        _GITHUB + "vllm-project/vllm/blob/main/csrc/custom_all_reduce.cuh",
    ),
    Pattern(
        "vLLM, SGLang, aiter: quick reduce",
        r"quickreduce::|allreduce_prototype_",
        "quickreduce::allreduce_prototype_twoshot",
        _GITHUB + "vllm-project/vllm/blob/main/csrc/quickreduce/quick_reduce.h",
    ),
    Pattern(
        "TensorRT-LLM, flashinfer: one-shot and two-shot all-reduce, over PCIe too",
        r"[Ll]amport|\bipc_\w*(?:push|rsag)|\bpush_oneshot",
        "rmsNormLamport",
        _GITHUB + "flashinfer-ai/flashinfer/tree/main/include/flashinfer/comm",
    ),
    Pattern(
        "TensorRT-LLM, flashinfer: expert parallel",
        r"moeA2A|moeAllToAll|allToAllMetadata|\w*_a2a_kernel",
        "moeA2ADispatchKernel",
        _GITHUB
        + "flashinfer-ai/flashinfer/tree/main/csrc/nv_internal/tensorrt_llm/kernels/communicationKernels",
    ),
    Pattern(
        "DeepEP",
        r"deep_ep::(?!(?:\w+::)*layout::)|\bdpsk::ep::int(?:er|ra)node",
        "deep_ep::internode_ll::dispatch",
        _GITHUB + "deepseek-ai/DeepEP/tree/main/csrc/kernels",
    ),
    Pattern(
        "MoRI",
        r"\bmori::|\bEp(?:Dispatch|Combine)\w*",
        "mori::moe::EpDispatchIntraNodeKernel",
        _GITHUB + "ROCm/mori/tree/main/src/ops/dispatch_combine",
    ),
    Pattern(
        "NVSHMEM",
        r"nvshmem|_on_stream_kernel",
        "alltoall_on_stream_kernel",
        _GITHUB + "NVIDIA/nvshmem/tree/devel/src/device",
    ),
    Pattern(
        "MSCCL++",
        r"mscclpp",
        "mscclpp::collective::allreduceNvlsPacket",
        _GITHUB + "microsoft/mscclpp/tree/main/src/ext/collectives",
    ),
    Pattern(
        "Transformer Engine, user buffers",
        r"userbuffers_",
        "kuserbuffers_pushsend",
        _GITHUB
        + "NVIDIA/TransformerEngine/tree/main/transformer_engine/common/comm_gemm_overlap/userbuffers",
    ),
)
"""Kernels that communicate."""

HOST_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "hccl:", "c10d::")
"""How the operators of collectives begin on the host: with the name of a backend of torch.distributed."""

_OTHERS = re.compile("|".join(f"(?:{row.pattern})" for row in PATTERNS if row is not NCCL))
_NCCL = re.compile(NCCL.pattern)
_BETWEEN_TWO = re.compile(r"send|rece?i?v|coalesced$", re.IGNORECASE)
_ALL_TO_ALL = re.compile(r"all_?to_?all")  # NCCL makes one of sends and receives
_LONGEST = 4096  # characters of a name that are looked at
_DEEPEST = 16  # levels of brackets
_INNERMOST = (re.compile(r"\([^()]*\)"), re.compile(r"<[^<>]*>"))


def own_name(kernel: str) -> str:
    """Return the name of a kernel without the types of its template and its parameters.

    >>> own_name("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(long, int)")
    'void ::multimem_all_reduce_kernel'
    """
    for innermost in _INNERMOST:
        for _ in range(_DEEPEST):
            kernel, count = innermost.subn("", kernel)
            if not count:
                break
    return re.split(r"[<(]", kernel, maxsplit=1)[0]


@lru_cache(maxsize=16)
def communicates(patterns: tuple[str, ...] = ()) -> Callable[[str], bool]:
    """Return a function that returns, for a kernel's name, whether the kernel communicates.

    Args:
        patterns: Regular expressions of the user, searched for in the whole name besides those of the table.

    Raises:
        ConfigError: A pattern is no regular expression.
    """
    added = [_compiled(pattern) for pattern in patterns]

    def check(name: str) -> bool:
        name = name[:_LONGEST]
        known = _NCCL.search(name) or _OTHERS.search(own_name(name))
        return bool(known) or any(pattern.search(name) for pattern in added)

    return check


class Group(NamedTuple):
    """Process group of a collective; by default none, or an unknown one, in which nobody waits.

    Attributes:
        name: Its name; processes that split a group give their parts the same one.
        ranks: Its ranks, as the trace lists them; for an NPU, the number that it has in names of collectives.
        size: Number of its ranks; 0 if that is unknown.
    """

    name: str = ""
    ranks: str = ""
    size: int = 1


class _Said(msgspec.Struct, gc=False):
    """The arguments that Kineto writes with the kernel of a collective."""

    collective: str = msgspec.field(name="Collective name", default="")
    name: str | int = msgspec.field(name="Process Group Name", default="")
    ranks: str = msgspec.field(name="Process Group Ranks", default="")
    size: int = msgspec.field(name="Group size", default=0)


_ARGUMENTS = msgspec.json.Decoder(_Said, strict=False)


def group_of(kernel: str, args: msgspec.Raw) -> Group | None:
    """Return the process group of a kernel that communicates; ``None`` if its arguments name none."""
    try:
        said = _ARGUMENTS.decode(args)
    except UNDECODABLE:
        said = _Said()
    return _group(kernel, said.collective, str(said.name), said.ranks, said.size)


@lru_cache(maxsize=1024)
def _group(kernel: str, collective: str, name: str, ranks: str, size: int) -> Group | None:
    said = f"{own_name(kernel[:_LONGEST])} {collective}"
    if _BETWEEN_TWO.search(said) and not _ALL_TO_ALL.search(collective):
        return Group()
    return Group(name, ranks, size) if any(map(str.isdigit, ranks)) else None


def only_group(info: Any) -> Group | None:
    """Return the process group that the header of a trace lists, if it is the only one of several ranks."""
    try:
        world = int(info["world_size"])
        listed = [list(one["ranks"]) for one in info.get("pg_config", ())] or [[]] * (world == 2)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    several = [ranks for ranks in listed if len(ranks) != 1]  # one without ranks has all
    groups = {(str(ranks), len(ranks)) if 0 < len(ranks) < world else ("all", world) for ranks in several}
    return Group("", *groups.pop()) if len(groups) == 1 else None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError("--communication", f"{pattern!r} is no regular expression: {error}") from None
