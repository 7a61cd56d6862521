"""The peaks of devices, for shares of them. Devices that are not here have no share."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """The peak of a device, for dense products of bfloat16; vendors often print the peak for sparse
    matrices, which is twice as high.

    Attributes:
        device: Name of the device, as torch's traces have it. A part of a device (MIG) has another
            name.
        tflops: Operations per second, in units of 10^12.
        bandwidth: Bandwidth of the memory, in units of 10^12 bytes per second.
        source: Origin of the numbers.
    """

    device: str
    tflops: float
    bandwidth: float
    source: str


_A100, _H100 = "NVIDIA A100 data sheet, June 2021", "NVIDIA H100 data sheet"
_CALLED = (
    "verl, `utils/flops_counter.py`; LLMRoofline, `hardware_dict.py`"  # no data sheet is public
)

PEAKS = (
    Peak("NVIDIA B200", 2250, 8.0, "NVIDIA DGX B200 data sheet, by 8"),
    Peak("NVIDIA H200", 989, 4.8, "NVIDIA H200 data sheet"),
    Peak("NVIDIA H100 80GB HBM3", 989, 3.35, _H100),
    Peak("NVIDIA H100 NVL", 835, 3.9, _H100),
    Peak("NVIDIA H100 PCIe", 756, 2.0, _H100),
    Peak("NVIDIA H800", 989, 3.35, _CALLED),
    Peak("NVIDIA H20", 148, 4.0, _CALLED),
    Peak("NVIDIA A100-SXM4-80GB", 312, 2.039, _A100),
    Peak("NVIDIA A100 80GB PCIe", 312, 1.935, _A100),
    Peak("NVIDIA A100-SXM4-40GB", 312, 1.555, _A100),
    Peak("NVIDIA A100-PCIE-40GB", 312, 1.555, _A100),
    Peak("NVIDIA L40S", 362, 0.864, "NVIDIA L40S data sheet"),
    Peak("AMD Instinct MI300X", 1307, 5.3, "AMD Instinct MI300X data sheet"),
    Peak("AMD Instinct MI325X", 1307, 6.0, "AMD Instinct MI325X data sheet"),
)
"""The peaks of known devices."""

PEAK_OF = {peak.device: peak for peak in PEAKS}
