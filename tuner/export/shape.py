"""The blocks of a draft as a checkpoint of its own, and the refusal of drafts that are none.

A skip of whole blocks is a shorter model. An exit with a trained head is one too: N blocks, and the head as block N + 1, since a
head is a block of the model's own class before the model's own final norm and LM head (our formulation).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from decoding.drafts import DraftDocument
from tuner.errors import ExportError

NOT_PER_LAYER = ("token_id", "token_ids", "architectures")
"""Endings of settings that may be lists by chance as long as the model is deep."""


DEPLOY_TO = "tune for an engine by sdtune search ... --deploy-to vllm|llama.cpp"


@dataclass(frozen=True)
class DraftShape:
    blocks: tuple[int, ...]
    """Indices of the target's blocks that the draft runs, ascending."""
    has_head: bool
    """True if a trained head follows as the last layer."""
    num_target_layers: int

    @property
    def sources(self) -> tuple[int, ...]:
        """Index of the target's block whose settings each layer has: a head is a trained copy of the last block."""
        return (*self.blocks, self.num_target_layers - 1) if self.has_head else self.blocks

    @property
    def is_whole(self) -> bool:
        return not self.has_head and len(self.blocks) == self.num_target_layers

    def describe(self) -> str:
        if self.is_whole:
            return f"the whole model, {self.num_target_layers} layers"
        head = " and the trained head" if self.has_head else ""
        return f"{len(self.blocks)} of {self.num_target_layers} blocks{head}, {len(self.sources)} layers"


def reduced(draft: DraftDocument, drops: Collection[str], *, keeps_bits: bool) -> DraftDocument:
    """Return the draft as engines choose its tokens, from all ids, and with the model's own weights if `drops` has `bits`.

    `keeps_bits` tells that the engine can quantise drafts itself. Raises `ExportError` for bits that it cannot, and that are not
    dropped, with the flag that drops them.
    """
    draft = draft.having(ids_below=None)
    if draft.parts.bits is None or (keeps_bits and "bits" not in drops):
        return draft
    if "bits" not in drops:
        raise ExportError(
            f"the draft has int{draft.parts.bits} weights, which this engine does not make: {DEPLOY_TO}; or --drop bits "
            "exports it without them, --to llama.cpp quantises it there, and --to folder keeps everything"
        )
    return draft.having(bits=None)


def shape_of(draft: DraftDocument, num_layers: int) -> DraftShape:
    """Return the layers of a draft that runs a part of a target with `num_layers` blocks.

    Raises `ExportError` for a draft that no list of blocks can express, with the nearest one that can.
    """
    skip = draft.skipped(num_layers)
    if set(skip.skip_attention) != set(skip.skip_mlp):
        raise ExportError(
            f"the draft skips single attention or MLP sublayers, and engines run whole blocks only: {DEPLOY_TO}, or keep "
            "everything with --to folder"
        )
    kept = tuple(index for index in range(num_layers) if index not in set(skip.skip_attention))
    if not kept:
        raise ExportError("the draft runs none of the model's blocks: only --to folder can hold it")
    shape = DraftShape(kept, draft.trained_head is not None, num_layers)
    if shape.is_whole and draft.parts.bits is None:
        raise ExportError(
            f"without its quantised weights the draft is the whole model, which cannot make it faster: {DEPLOY_TO}; or "
            "--to llama.cpp quantises it there, and --to folder keeps everything"
        )
    return shape


def per_layer_settings(config: Any) -> dict[str, list[Any]]:
    """Return the settings of a configuration that are lists with an entry per layer."""
    num_layers = config.num_hidden_layers
    return {
        name: list(value)
        for name, value in config.to_dict().items()
        if isinstance(value, list | tuple) and len(value) == num_layers and not name.endswith(NOT_PER_LAYER)
    }


def moved_settings(config: Any, shape: DraftShape) -> tuple[str, ...]:
    """Return the per-layer settings that an engine gets wrong if it derives them from the index of a layer."""
    settings, num_layers = per_layer_settings(config), len(shape.sources)
    return tuple(
        name for name, values in settings.items() if [values[source] for source in shape.sources] != values[:num_layers]
    )
