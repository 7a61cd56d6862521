"""Which kernels communicate, by the table of names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawn_steps import Worker, drawn_inputs

from verl_profiling.cli import main
from verl_profiling.report.kinds import PATTERNS, Pattern, communicates, own_name

# Names as profilers wrote them.
COMMUNICATION = (
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*, unsigned)",
    "_ZN5aiter26cross_device_reduce_2stageIDF16bLi8ELb0EEEv",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1, half>(int)",
    "void deep_ep::legacy::intranode::notify_dispatch<8>(int const*)",
)
COMPUTATION = (
    "void SmallReduceKernel<float>(float*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(at::native::ReduceOp<float>)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)",
    "void cutlass::device_kernel<cutlass::sm90_allreduce_nvls<float> >(Params)",
    "void fused_moe::combine<__nv_bfloat16>(int*)",
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<half>::exists, void>::type vllm::fused_add_rms_norm",
    "void deep_ep::legacy::layout::get_dispatch_layout<256, 32, 8>(long const*)",
    "void at::native::(anonymous namespace)::scatter_reduce_kernel<deep_ep::Buffer>(int)",
    "void dpsk::ep::cuda::get_dispatch_layout<256>(long const*)",
)


@pytest.mark.parametrize("name", COMMUNICATION)
def test_these_kernels_communicate(name: str) -> None:
    """Demangled or not, in any namespace and with any parameters."""
    assert communicates()(name)


@pytest.mark.parametrize("name", COMPUTATION)
def test_these_kernels_compute(name: str) -> None:
    """Neither a similar word nor a type among the arguments makes a kernel one that communicates."""
    assert not communicates()(name)


def test_experts_are_dispatched_and_combined_by_communication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek's own kernels; the layout of a dispatch is computed."""
    names = ["internode::dispatch<4>", "intranode::combine<8>", "cuda::get_dispatch_layout<256>"]
    kernels = [(f"void dpsk::ep::{name}(int*)", at, at + 1.0) for at, name in enumerate(names)]
    drawn_inputs(tmp_path, [("update_actor", 0, 4)], [Worker("actor", kernels=kernels)], 4)
    assert main(["report", str(tmp_path), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["workers"]
    assert (row["busy_us"], row["communication_us"], row["compute_us"]) == (3e6, 2e6, 1e6)


@pytest.mark.parametrize("row", PATTERNS, ids=lambda row: row.library)
def test_a_row_of_the_table_matches_its_example(row: Pattern) -> None:
    assert communicates()(row.example)


@pytest.mark.parametrize("name", ["<" * 100_000, "(" * 5_000 + ")" * 5_000, "x<" * 4_000 + ">" * 4_000, ""])
def test_names_of_any_form_are_looked_at_in_bounded_time(name: str) -> None:
    """Brackets without end, or without a name, are no reason to wait."""
    assert not communicates()(name)
    assert "<" not in own_name(name)[1:]
