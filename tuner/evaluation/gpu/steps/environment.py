"""Facts about the machine: what any figure depends on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.shared import Shared
from tuner.inputs.environment import device_name, versions

PACKAGES = ("triton", "numpy", "safetensors", "tokenizers", "mlflow", "datasets", "greenlet")


@dataclass(frozen=True)
class EnvironmentFacts:
    """Step: device, versions, free memory, attention backends, and tools that compilation needs."""

    name: str = "environment"
    question: str = "Which device, versions and backends are these?"
    limit_seconds: float = 15
    pessimistic_seconds: float = 14

    def run(self, shared: Shared, seconds: float) -> Result:
        """Collect the facts; starting the process counts to this step."""
        backends = torch.backends.cuda
        return {
            "device": device_name(shared.device),
            "versions": {**versions(), **_versions_of(PACKAGES)},
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "attention": {
                "flash": backends.flash_sdp_enabled(),
                "memory_efficient": backends.mem_efficient_sdp_enabled(),
                "math": backends.math_sdp_enabled(),
                "cudnn": backends.cudnn_sdp_enabled(),
            },
            "float32_matmul": torch.get_float32_matmul_precision(),
            "cpus": os.cpu_count(),
            "compilers": {name: shutil.which(name) is not None for name in ("gcc", "g++", "cc", "nvcc")},
            "memory": _memory(shared.device),
        }

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield device, versions and memory."""
        found = result["versions"]
        yield result["device"]
        yield f"torch {found['torch']}, transformers {found['transformers']}, CUDA {result['cuda']}, cuDNN {result['cudnn']}"
        if result["memory"]:
            yield f"{result['memory']['free_bytes'] / 2**30:.1f} of {result['memory']['total_bytes'] / 2**30:.1f} GiB free"


def _versions_of(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _memory(device: torch.device) -> dict[str, Any] | None:
    """Return facts on the device's memory and processors, or None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    facts = torch.cuda.get_device_properties(device)
    return {
        "free_bytes": free,
        "total_bytes": total,
        "capability": [facts.major, facts.minor],
        "multiprocessors": facts.multi_processor_count,
    }
