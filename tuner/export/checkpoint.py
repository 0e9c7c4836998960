"""Draft folders: some blocks of a target, and perhaps a trained head, as an ordinary checkpoint of the target's family.

Our formulation. Blocks before norm and LM head are renumbered from 0; lists in the configuration with an entry per layer
(`layer_types` and the like) keep the entries of the kept blocks, and a head that of the block it was copied from, the last.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.errors import first_line
from decoding.target import ExitHead, Target
from tuner.errors import ExportError
from tuner.export.shape import DraftShape, per_layer_settings
from tuner.inputs.models import quiet

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "special_tokens_map.json", "added_tokens.json")
CHAT_TEMPLATES = ("chat_template*",)
READABLE = 0o644


def draft_config(config: Any, shape: DraftShape) -> PreTrainedConfig:
    """Return the configuration of the draft; the target's stays as it is."""
    values, sources = config.to_dict(), shape.sources
    values |= {name: [each[source] for source in sources] for name, each in per_layer_settings(config).items()}
    values[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(sources)
    narrowed: PreTrainedConfig = type(config).from_dict(values)
    return narrowed


def write_checkpoint(target: Target, shape: DraftShape, head: ExitHead | None, folder: Path) -> int:
    """Write the draft into the new folder `folder`, as `save_pretrained` does, and return the bytes of its tensors.

    The weights are the target's own in memory until they are on disk. Raises `ExportError` for a model with parts beside its
    language model, and for one whose blocks cannot be renumbered.
    """
    draft = _draft_model(target, shape, head)
    with quiet():
        draft.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(READABLE)  # weights are written for their owner alone, and an engine may run as another user
    return sum(parameter.numel() * parameter.element_size() for parameter in draft.parameters())


def _draft_model(target: Target, shape: DraftShape, head: ExitHead | None) -> PreTrainedModel:
    model = target.model
    if model.config is not target.config:
        raise ExportError(
            f"{type(model).__name__} has parts beside its language model, which a draft folder would carry too: only --to folder "
            "can hold it"
        )
    try:
        with torch.device("meta"), quiet():
            draft: PreTrainedModel = type(model)(draft_config(model.config, shape))
        draft.requires_grad_(False)  # weights loaded in inference mode admit no gradients
        draft.load_state_dict(dict(_tensors(target, shape, head)), assign=True)
    except (RuntimeError, ValueError, TypeError, KeyError) as cause:
        raise ExportError(
            f"the blocks of {type(model).__name__} cannot be renumbered ({first_line(cause)}): only --to folder can hold the draft"
        ) from None
    draft.tie_weights()
    draft.generation_config = copy.deepcopy(model.generation_config)
    draft.generation_config._from_model_config = (
        False  # else `generate` may derive it anew, without an assistant's settings
    )
    return draft.eval()


def _tensors(target: Target, shape: DraftShape, head: ExitHead | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the draft: all that is outside the target's blocks, the kept blocks, and the head."""
    path = ".".join(target.anatomy.path)
    for name, tensor in target.model.state_dict().items():
        if not name.startswith(f"{path}."):
            yield name, tensor
    layers: Sequence[Any] = [target.blocks[index] for index in shape.blocks]
    for index, block in enumerate([*layers, *([head.block] if head else [])]):
        for name, tensor in block.state_dict().items():
            yield f"{path}.{index}.{name}", tensor


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files of a model folder, unchanged: an engine may read other versions than this transformers writes."""
    for pattern in (*TOKENIZER_FILES, *CHAT_TEMPLATES):
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
