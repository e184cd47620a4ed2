"""Peak speed of devices for dense matrix products, from their makers' data sheets. A table, and no estimate.

Data sheets print figures "with sparsity" that no dense product reaches; here are the dense ones, half of those. All in
10^12 FLOP/s (a multiplication and an addition are two), for one device as torch names it:

    NVIDIA V100 data sheet (2020), A100 (2021), A30, A10 (2021), A40 (2022), H100 (2022: SXM, PCIe; 2024: NVL),
    H200 (2024: SXM, NVL), GH200 (2023), L4, L40 (2023), L40S (2023), HGX B200 and GB200 NVL72 (2025, a GPU's share),
    AMD Instinct MI300X (2023), MI325X (2024)
"""

import re
from typing import Literal

import torch

__all__ = ["MatmulDtype", "peak_flops_per_s"]

MatmulDtype = Literal["float32", "tfloat32", "float16", "bfloat16"]

_HOPPER_SXM = {"bfloat16": 989.4, "float16": 989.4, "tfloat32": 494.7, "float32": 66.9}
_HOPPER_NVL = {"bfloat16": 835.5, "float16": 835.5, "tfloat32": 417.5, "float32": 60.0}
_MI300X = {"bfloat16": 1307.4, "float16": 1307.4, "tfloat32": 653.7, "float32": 163.4}

# The whole name must fit: a part of a device (MIG) and a namesake of a later year are other devices.
_TFLOPS: dict[str, dict[str, float]] = {
    r"Tesla V100-SXM2-\d+GB(-LS)?": {"float16": 125.0, "float32": 15.7},
    r"(NVIDIA )?A100-(SXM4|PCIE|PCI)-\d+GB|NVIDIA A100 80GB PCIe": {
        "bfloat16": 312.0,
        "float16": 312.0,
        "tfloat32": 156.0,
        "float32": 19.5,
    },
    r"NVIDIA A30": {"bfloat16": 165.0, "float16": 165.0, "tfloat32": 82.0, "float32": 10.3},
    r"NVIDIA A10": {"bfloat16": 125.0, "float16": 125.0, "tfloat32": 62.5, "float32": 31.2},
    r"NVIDIA A40": {"bfloat16": 149.7, "float16": 149.7, "tfloat32": 74.8, "float32": 37.4},
    r"NVIDIA H100 80GB HBM3": _HOPPER_SXM,
    r"NVIDIA H100 PCIe": {"bfloat16": 756.0, "float16": 756.0, "tfloat32": 378.0, "float32": 51.0},
    r"NVIDIA H100 NVL": _HOPPER_NVL,
    r"NVIDIA H200": _HOPPER_SXM,
    r"NVIDIA H200 NVL": _HOPPER_NVL,
    r"NVIDIA GH200 (480GB|144G HBM3e)": _HOPPER_SXM,
    r"NVIDIA L4": {"bfloat16": 121.0, "float16": 121.0, "tfloat32": 60.0, "float32": 30.3},
    r"NVIDIA L40": {"bfloat16": 181.05, "float16": 181.05, "tfloat32": 90.5, "float32": 90.5},
    r"NVIDIA L40S": {"bfloat16": 362.05, "float16": 362.05, "tfloat32": 183.0, "float32": 91.6},
    r"NVIDIA B200": {"bfloat16": 2250.0, "float16": 2250.0, "tfloat32": 1125.0, "float32": 75.0},
    r"NVIDIA GB200": {"bfloat16": 2500.0, "float16": 2500.0, "tfloat32": 1250.0, "float32": 80.0},
    r"AMD Instinct MI300X( OAM)?": _MI300X,
    r"AMD Instinct MI325X( OAM)?": _MI300X,
}


def peak_flops_per_s(device_name: str, dtype: MatmulDtype) -> float | None:
    """FLOP/s that the device's data sheet promises for dense matrix products; None where this table lacks it.

    Args:
        device_name: as `torch.cuda.get_device_name()` says it.
        dtype: what is multiplied. `float32` products run as `tfloat32` where
            `torch.get_float32_matmul_precision()` is not "highest".
    """
    for pattern, tflops in _TFLOPS.items():
        if re.fullmatch(pattern, device_name.strip()):
            return tflops[dtype] * 1e12 if dtype in tflops else None
    return None


def peak_of_this_device(device: torch.device, precision: Literal["float32", "bfloat16"]) -> float | None:
    """The same for the GPU under `device`, computing in `precision` as torch is set now; None for a CPU."""
    if device.type != "cuda":
        return None
    fast = precision == "float32" and torch.get_float32_matmul_precision() != "highest"
    return peak_flops_per_s(torch.cuda.get_device_name(device), "tfloat32" if fast else precision)
