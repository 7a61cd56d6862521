"""Classifies the events of a trace: which are work of which kind, and which calls block the host.

* **Device trace** (has device events): busy time is the union, over all streams, of kernels and
  copies. Kernels in the table of communication kernels are communication, all others computation;
  copies and memsets are memory.
* **CPU trace** (has no device events): busy time is the union, over all threads, of operators,
  runtime calls and collectives. Waiting in Python between them is not busy time.
* **NPU trace** (msprof's, in torch_npu's ``trace_view.json``): events have no category. The name of
  an event's process decides its kind; for events of the hardware, the task type does.

Device events are classified as in HolisticTraceAnalysis 0.5 (``utils/utils.py``,
``get_kernel_type``), so figures can be compared. The table of communication kernels has further
kernels that HTA does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from verl_profiling.errors import ConfigError
from verl_profiling.files.engine_iterations import parse_iteration
from verl_profiling.files.opener import UNDECODABLE
from verl_profiling.steps.trace import Event

Meaning = Literal[
    "kernel", "copy", "on device, no work", "host", "collective on the host", "no work"
]


class Category(NamedTuple):
    """The meaning of one or several values of ``cat``, the category of an event in a Chrome trace.

    Attributes:
        names: The categories; ``*`` stands for the name of any vendor, as in ``gpu_memcpy``.
        of: Accelerators, or versions of torch, whose traces have the categories.
        meaning: What the events are, e.g. kernels, or no work.
    """

    names: tuple[str, ...]
    of: str
    meaning: Meaning


CATEGORIES = (
    # pytorch/kineto: libkineto/include/ActivityType.h
    Category(("kernel",), "CUDA, ROCm, XPU, HPU, PrivateUse1", "kernel"),
    # facebookresearch/HolisticTraceAnalysis: hta/common/types.py
    Category(("mtia_ccp_events",), "MTIA", "kernel"),
    Category(
        ("gpu_user_annotation", "cuda_sync", "cuda_event", "cuda_profiler_range"),
        "CUDA, ROCm",
        "on device, no work",
    ),
    # pytorch/kineto: libkineto/src/plugin/xpupti
    Category(("xpu_sync", "xpu_scope_profiler"), "XPU", "on device, no work"),
    Category(("mtia_insight", "mtia_counters"), "MTIA", "on device, no work"),
    Category(("hardware_counters",), "CUDA", "on device, no work"),
    Category(("cpu_op",), "every torch", "host"),
    Category(("hpu_op",), "HPU", "host"),  # HabanaAI/gaudi-pytorch-bridge
    # MLU: Cambricon/torch_mlu, third_party/kineto_mlu/libkineto/src/ActivityType.cpp
    Category(
        ("*_memcpy", "*_memset"), "CUDA, ROCm, XPU, PrivateUse1, any other vendor, as MLU", "copy"
    ),
    Category(
        ("*_runtime", "*_driver"),
        "CUDA, ROCm, XPU, MTIA, PrivateUse1, any other vendor, as MLU",
        "host",
    ),
    Category(
        ("*_user_annotation", "*_sync", "*_profiler_range"),
        "any other vendor, as MLU",
        "on device, no work",
    ),
    Category(("collective_comm",), "XPU", "collective on the host"),
    Category(
        ("user_annotation", "python_function", "Python", "cpu_instant_event", "overhead", "Trace"),
        "every torch",
        "no work",
    ),
    Category(("external_correlation", "ProfilerStep", "Module", "Memory"), "torch", "no work"),
    # Ascend/pytorch: torch_npu/profiler/analysis
    Category(("enqueue", "dequeue"), "Ascend NPU", "no work"),
)
"""All known categories."""

_MEANINGS = {name: category.meaning for category in CATEGORIES for name in category.names}
_NOT_OF_A_PROCESS = ("Trace", "overhead")  # categories of kineto's own marks
_LAUNCHES = ("ac2g", "async")  # arrows from a call on the host to its kernel


@lru_cache(maxsize=1024)
def meaning_of(category: str) -> Meaning | None:
    """Return the meaning of a category; ``None`` if the category is unknown."""
    for name, meaning in _MEANINGS.items():
        if fnmatchcase(category, name):
            return meaning
    return None


def is_on_device(event: Event) -> bool:
    """Return whether an event is on a device: by its category, or as the end of the flow arrow from
    a launch to its kernel.
    """
    if event.ph == "f" and event.cat in _LAUNCHES:
        return True
    return meaning_of(event.cat) in ("kernel", "copy", "on device, no work")


def is_host(event: Event) -> bool:
    """Return whether an event belongs to a process on the host."""
    on_host = meaning_of(event.cat) in ("host", "collective on the host", "no work")
    return on_host and event.cat not in _NOT_OF_A_PROCESS


class Pattern(NamedTuple):
    """Names of the communication kernels of one library.

    Attributes:
        library: Name of the library.
        pattern: Regular expression that is searched for in a name.
        example: One of the names.
    """

    library: str
    pattern: str
    example: str


_COLLECTIVE = (
    r"(?:All|(?<![A-Za-z])(?:all|ALL))_?(?:[Rr]educe|REDUCE|[Gg]ather|GATHER|[Tt]o_?[Aa]ll|TO_?ALL|2[Aa]ll)"
    r"|[Rr]educe_?[Ss]catter"
)
_SYMMETRIC = r"\bmultimem_|symmetric_memory::|\b(?:put|wait)_signal_kernel"
_DEEP_EP = r"deep_ep::(?!(?:\w+::)*layout::)|\bdpsk::ep::int(?:er|ra)node"
_OVER_PCIE = r"[Ll]amport|\bipc_\w*(?:push|rsag)|\bpush_oneshot"
_EXPERTS = r"moeA2A|moeAllToAll|allToAllMetadata|\w*_a2a_kernel"

PATTERNS = (
    # NVIDIA/nccl: src/device
    Pattern("NCCL, RCCL", r"(?i:nccl)", "ncclDevKernel_AllGather_RING_LL"),
    Pattern("any: the name of a collective", _COLLECTIVE, "twoShotAllReduceKernel"),
    # ROCm/rccl: src/include/msccl/msccl_kernel.h
    Pattern("RCCL with MSCCL", r"mscclKernel_|rcclGenericKernel", "mscclKernel_Sum_half_LL_false"),
    # kali20gakki/msprof
    Pattern("HCCL", r"^hccl|^hcom_", "hcom_allReduce_"),
    # intel/torch-xpu-ops: issue 5384
    Pattern("oneCCL", r"\boneccl_", "oneccl_reduce_base"),
    # pytorch/pytorch: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu
    Pattern("torch, symmetric memory", _SYMMETRIC, "multimem_all_reduce_kernel"),
    # vllm-project/vllm: csrc/custom_all_reduce.cuh, csrc/quickreduce/quick_reduce.h
    Pattern(
        "vLLM, SGLang, aiter: custom all-reduce",
        "cross_device_reduce",
        "vllm::cross_device_reduce_2stage",
    ),
    Pattern(
        "vLLM, SGLang, aiter: quick reduce",
        "quickreduce::|allreduce_prototype_",
        "quickreduce::allreduce_prototype_twoshot",
    ),
    # flashinfer-ai/flashinfer: include/flashinfer/comm,
    # csrc/nv_internal/tensorrt_llm/kernels/communicationKernels
    Pattern(
        "TensorRT-LLM, flashinfer: one-shot and two-shot all-reduce, over PCIe too",
        _OVER_PCIE,
        "rmsNormLamport",
    ),
    Pattern("TensorRT-LLM, flashinfer: expert parallel", _EXPERTS, "moeA2ADispatchKernel"),
    # deepseek-ai/DeepEP: csrc/kernels
    Pattern("DeepEP", _DEEP_EP, "deep_ep::internode_ll::dispatch"),
    # ROCm/mori: src/ops/dispatch_combine
    Pattern(
        "MoRI", r"\bmori::|\bEp(?:Dispatch|Combine)\w*", "mori::moe::EpDispatchIntraNodeKernel"
    ),
    # NVIDIA/nvshmem: src/device
    Pattern("NVSHMEM", "nvshmem|_on_stream_kernel", "alltoall_on_stream_kernel"),
    # microsoft/mscclpp: src/ext/collectives
    Pattern("MSCCL++", "mscclpp", "mscclpp::collective::allreduceNvlsPacket"),
    # NVIDIA/TransformerEngine: transformer_engine/common/comm_gemm_overlap/userbuffers
    Pattern("Transformer Engine, user buffers", "userbuffers_", "kuserbuffers_pushsend"),
)
"""Kernels that communicate. The first pattern, NCCL's, is searched in the whole name; the others in
:func:`own_name`.
"""

LAUNCHES = "c10d::"
"""Prefix of the names of host calls that launch a collective."""

HOST_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:", "hccl:", LAUNCHES)
"""Prefixes of the names of collective operators on the host: backends of torch.distributed."""

_OTHERS = re.compile("|".join(f"(?:{row.pattern})" for row in PATTERNS[1:]))
_NCCL = re.compile(PATTERNS[0].pattern)
_BETWEEN_TWO = re.compile(r"send|rece?i?v|coalesced$", re.IGNORECASE)
_ALL_TO_ALL = re.compile(r"all_?to_?all")  # NCCL makes one of sends and receives
_LONGEST = 4096  # characters of a name that are looked at
_DEEPEST = 16  # levels of brackets
_INNERMOST = (re.compile(r"\([^()]*\)"), re.compile(r"<[^<>]*>"))


def own_name(kernel: str) -> str:
    """Return the name of a kernel without the types of its template and its parameters.

    >>> own_name("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(long)")
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
        patterns: Further regular expressions of the user, searched in the whole name.

    Raises:
        ConfigError: A pattern is no regular expression.
    """
    added = [_compiled(pattern) for pattern in patterns]

    def check(name: str) -> bool:
        name = name[:_LONGEST]
        if _NCCL.search(name) or _OTHERS.search(own_name(name)):
            return True
        return any(pattern.search(name) for pattern in added)

    return check


class Group(NamedTuple):
    """Process group of a collective. The default, of size 1, is an unknown group: waits in it are
    unknown.

    Attributes:
        name: Name of the group; the groups into which a larger one was split share one name.
        ranks: Ranks of the group, as listed in the trace. On an NPU, the number of the group, which
            is part of the names of its collectives.
        size: Number of ranks; 0 if unknown.
        collective: Name of the collective, if the trace has it: a kernel's own name may not say it.
    """

    name: str = ""
    ranks: str = ""
    size: int = 1
    collective: str = ""


class _Said(msgspec.Struct, gc=False):
    """The arguments that Kineto (torch's trace writer) stores with the kernel of a collective."""

    collective: str = msgspec.field(name="Collective name", default="")
    name: str | int = msgspec.field(name="Process Group Name", default="")
    ranks: str = msgspec.field(name="Process Group Ranks", default="")
    size: int = msgspec.field(name="Group size", default=0)
    sent: object = msgspec.field(name="In msg nelems", default=0)
    received: object = msgspec.field(name="Out msg nelems", default=0)
    type: object = msgspec.field(name="dtype", default="")


_ARGUMENTS = msgspec.json.Decoder(_Said, strict=False)


# Types of torch by the size of an element (bytes), of names in pytorch/pytorch:
# c10/core/ScalarType.h
_ITEM_BYTES = {
    1: "Bool Byte Char Float8_e4m3fn Float8_e5m2",
    2: "Short Half BFloat16",
    4: "Int Float",
    8: "Long Double",
}


_MOST_ELEMENTS = 1 << 40  # more than the memory of any device has


def item_bytes(type_name: str) -> int:
    """Return the size of an element of a torch type, e.g. ``BFloat16``; 0 for an unknown type."""
    for size, names in _ITEM_BYTES.items():
        if type_name in names.split():
            return size
    return 0


def group_and_bytes(kernel: str, args: msgspec.Raw) -> tuple[Group | None, int]:
    """Return the process group of a communication kernel and its bytes, from its arguments.

    The group is ``None`` if the arguments list no ranks. A send or receive has the unknown group.
    The bytes are those of the input or of the output of one rank, whichever are more, as nccl-tests
    count them (``doc/PERFORMANCE.md`` there); 0 if elements or type are unknown.
    """
    try:
        said = _ARGUMENTS.decode(args)
    except UNDECODABLE:
        said = _Said()
    elements = max(map(counted, (said.sent, said.received)))
    size = elements * item_bytes(str(said.type))
    return _group(kernel, said.collective, str(said.name), said.ranks, said.size), size


def counted(value: object) -> int:
    """Return a number of elements; 0 for any other value."""
    if isinstance(value, int) and 0 < value < _MOST_ELEMENTS:
        return value
    return 0


@lru_cache(maxsize=1024)
def _group(kernel: str, collective: str, name: str, ranks: str, size: int) -> Group | None:
    said = f"{own_name(kernel[:_LONGEST])} {collective}"
    if _BETWEEN_TWO.search(said) and not _ALL_TO_ALL.search(collective):
        return Group()
    if any(map(str.isdigit, ranks)):
        return Group(name, ranks, size, collective)
    return None


def only_group(info: Any) -> Group | None:
    """Return the process group in the header of a trace, if only one group has several ranks.

    All collectives that name no group are then of this group.

    Args:
        info: The header's ``distributedInfo``.
    """
    try:
        world = int(info["world_size"])
        listed = [list(group["ranks"]) for group in info.get("pg_config", ())]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    if not listed and world == 2:
        listed = [[]]
    groups = {group_of(ranks, world) for ranks in listed if len(ranks) != 1}
    if len(groups) == 1:
        return groups.pop()
    return None


def group_of(ranks: list[Any], world: int) -> Group:
    """Return the process group of the given ranks; a group without ranks has all."""
    if 0 < len(ranks) < world:
        return Group("", str(ranks), len(ranks))
    return Group("", "all", world)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            "--communication", f"{pattern!r} is no regular expression: {error}"
        ) from None


COMPUTE, COMMUNICATION, MEMORY, UNKNOWN, HOST, HOST_COMMUNICATION, ITERATION, NOTHING = range(8)
"""Kinds of events, in this order: three on the device, unknown category, two on the host, iteration
of an engine, no work. Code compares them: ``kind < UNKNOWN`` is known work of a device.
"""

_KINDS: dict[str | None, int] = {
    "kernel": COMPUTE,
    "copy": MEMORY,
    "host": HOST,
    "collective on the host": HOST_COMMUNICATION,
    None: UNKNOWN,
}
"""Kind of events by the meaning of their category."""

_QUEUES = ("enqueue", "dequeue")  # torch_npu's queue to the thread that calls the NPU
NO_WORK = frozenset(
    name for name, meaning in _MEANINGS.items() if meaning in ("no work", "on device, no work")
) - {"user_annotation", *_QUEUES}
"""Categories of events that are skipped without a look at their names, because they are no work."""

_LAUNCH = re.compile(r"Launch|runFunction|EnqueueKernel")
# MTIA gives copies, waits and control tasks the category of kernels. Their names are from HTA's
# ``types.py`` and from traces.
_MTIA = "mtia_ccp_events"
_MTIA_COPY = "dma"
_MTIA_CONTROL = re.compile(
    r"job_exe|packet|cpum_exe_subgraph|collective_subgraph_execution|runFunction|event_(?:wait|record)$"
)


def kind_of(category: str, name: str, communicates: Callable[[str], bool]) -> int:
    """Return the kind of an event by its category and name.

    Args:
        category: Category of the event.
        name: Name of the event.
        communicates: Returns whether the kernel of a given name communicates.
    """
    kind = _KINDS.get(meaning_of(category), NOTHING)
    is_annotation = category == "user_annotation"
    if category == _MTIA and _MTIA_CONTROL.match(name):
        return NOTHING
    if category == _MTIA and name.startswith(_MTIA_COPY):
        return MEMORY
    if kind == COMPUTE and communicates(name):
        return COMMUNICATION
    if (kind == HOST or is_annotation) and name.startswith(HOST_COLLECTIVES):
        return HOST_COMMUNICATION
    if is_annotation and parse_iteration(name):
        return ITERATION
    return kind


def is_launch(category: str, name: str) -> bool:
    """Return whether an event is a host call that enqueues work on a device."""
    if category in _QUEUES:
        return True
    return meaning_of(category) == "host" and category != "cpu_op" and bool(_LAUNCH.search(name))


# Process names in an NPU trace, from msprof's parser (github.com/kali20gakki/msprof,
# ``analysis/csrc/application/timeline``); the second name of each pair is from older versions.
_HARDWARE = ("Ascend Hardware", "Task Scheduler")  # a thread per stream, an event per task
_COLLECTIVES = (
    "Communication",
    "HCCL",
)  # a thread per group; "Plane" threads hold parts of collectives
_HOSTS = (
    "CANN",
    "AscendCL",
    "CPU functions",
)  # runtime calls; "CPU functions": torch.autograd.profiler
_COLLECTIVE_KERNELS = ("AicpuKernel", "AivKernel")
_COMPUTING = re.compile(
    r"(?:^|[ _])(?:AI_?CORE|AI_?VEC(?:TOR_CORE)?|AI_?CPU|AIC|AIV|SIMT|DSA)(?:[ _]|$)", re.IGNORECASE
)
_COPYING = re.compile(r"MEMCPY|(?:^|[ _])(?:S|PCIE_)?DMA(?:[ _]|$)", re.IGNORECASE)
_WAITING = re.compile(
    r"EVENT|NOTIFY|WAIT|RECORD|WRITE[ _]VALUE|PLACE_?HOLDER|PROFILING|MAINTAINCE|ACTIVE",
    re.IGNORECASE,
)
_TYPE_NAME = re.compile(r"[A-Z0-9_]+")


def npu_kind(process: str, pid: object, thread: str, name: str, task_type: str) -> int:
    """Return the kind of an event of an NPU trace, which has no category.

    Args:
        process: Name of the event's process, e.g. ``Ascend Hardware``.
        pid: Id of the process, which may be a name.
        thread: Name of the thread.
        name: Name of the event.
        task_type: Argument ``Task Type`` of the event; empty without one.
    """
    if process in _HARDWARE:
        return task_kind(name, task_type)
    if process in _COLLECTIVES and not thread.startswith("Plane"):
        return COMMUNICATION
    if process in _HOSTS or pid in _HOSTS:
        return HOST
    return NOTHING


def task_kind(name: str, task_type: str) -> int:
    """Return the kind of a task of the hardware.

    Tasks of AI cores and AI CPU are computation, DMA tasks are copies. Waits, records and
    placeholders are no work. Kernels of a collective are no work either, because the collective has
    its own event. Other types (e.g. ``Other``, if msprof does not know the chip) are classified by
    the task's name. A name in capitals, e.g. ``MEMCPY_ASYNC``, is a task type; any other name is an
    operator, and its task is computation.
    """
    if name.endswith(_COLLECTIVE_KERNELS):
        return NOTHING
    types = [task_type]
    is_operator = bool(task_type) and name != task_type
    if _TYPE_NAME.fullmatch(name):
        types.append(name)
        is_operator = False
    for kind in types:
        if _COMPUTING.search(kind):
            return COMPUTE
        if _COPYING.search(kind):
            return MEMORY
        if _WAITING.search(kind):
            return NOTHING
    return COMPUTE if is_operator else NOTHING


# Calls of the CUDA runtime and driver API, of HIP and of AscendCL. An asynchronous copy returns
# after about 10 us, but a copy from pageable memory blocks ("API synchronization behavior" in the
# CUDA Runtime API). So an asynchronous copy counts as blocking if the call takes long.
LONG_COPY_NS = 100_000
_NEVER_NS = 1 << 62
_BLOCKING = re.compile(
    r"(?:AscendCL@)?(?:cuda|cu|hip|aclrt)"
    r"(?:Memcpy|Malloc|Free|MemAlloc|MemFree|HostAlloc|HostRegister|\w*Synchronize)"
)


def blocks_from_ns(kind: int, name: str) -> int:
    """Return the least duration (ns) with which a call counts as blocking the host.

    It is 0 for ``cudaDeviceSynchronize``, 100 us for asynchronous copies, and huge for calls that
    never block.
    """
    if kind != HOST or not _BLOCKING.match(name):
        return _NEVER_NS
    if "Async" not in name:
        return 0
    if "Memcpy" in name:
        return LONG_COPY_NS
    return _NEVER_NS
