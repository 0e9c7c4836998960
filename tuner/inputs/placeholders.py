"""Texts that stand in for data which must be fetched elsewhere, and where to get it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tuner.errors import DatasetError

PLACEHOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE": (
            "SPEED-Bench publishes many rows without their texts, which its script prepare.py fetches from their sources (in "
            "github.com/NVIDIA-NeMo/Skills, nemo_skills/dataset/speed-bench); run it, and give --dataset the file that it writes, "
            "such as qualitative.jsonl"
        )
    }
)
"""Advice by placeholder. SPEED-Bench: huggingface.co/datasets/nvidia/SPEED-Bench."""


def refuse_placeholders(text: str, name: str) -> None:
    """Raise `DatasetError` if a text is a placeholder; `name` is the row's."""
    for placeholder, advice in PLACEHOLDERS.items():
        if placeholder in text:
            raise DatasetError(f"{name} holds a placeholder in place of the prompt: {advice}")
