"""Trained heads on disk: one safetensors file per exit head, whose metadata names the model and the training.

A head is a block of the model's own class with keys and values of its own, before the target's own final norm and LM head.
`tuner.heads` trains heads, `decoding.head_folder` knows a folder of them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import nn

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document, validate
from decoding.errors import ExitHeadError, one_line
from decoding.fingerprint import Fingerprint, fingerprint
from decoding.target import Target

METADATA_KEY = "sdtune"


class ExitFigures(Document):
    """Accuracy of an exit on sequences that it was not trained on: means over all positions of the responses."""

    acceptance: float = Field(ge=0.0, le=1.0, description="sum over v of min(p, q): the exact sampling acceptance")
    agreement: float = Field(ge=0.0, le=1.0, description="share of positions where both have the same likeliest token")


class HeadTraining(Document):
    """Training of a head, and its effect. It is information for readers: keys that another version has recorded are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    dataset: str
    prompts_sha256: tuple[str, ...] = Field(description="short hash of each prompt that it was trained on")
    num_texts: int
    num_tokens: int
    temperature: float
    steps: int
    seconds: float = Field(description="to generate the training texts and to train all heads of the distillation")
    before: ExitFigures = Field(description="of the exit without a head")
    after: ExitFigures
    device: str
    versions: dict[str, str]
    identity: dict[str, Any] = Field(
        default_factory=dict,
        description="model, texts and settings that decide the weights: what makes it the same head",
    )


def _all_tokens(size: object) -> None:
    if size is not None:
        raise ValueError(
            f"the head drafts from {size} tokens only, as those of an earlier version could: distil it anew"
        )


class HeadFacts(Document):
    """Metadata of a head's file."""

    schema_: Literal["sdtune-exit-head/v1"] = Field("sdtune-exit-head/v1", alias="schema")
    exit_layer: int = Field(ge=1, description="number of blocks before the head")
    num_layers: int
    architecture: str
    config_sha256: str
    weights_sha256: str
    draft_vocabulary: Annotated[None, BeforeValidator(_all_tokens)] = Field(
        None, exclude=True, description="of earlier versions, whose heads could draft from some tokens"
    )
    training: HeadTraining | None = None


def head_name(exit_layer: int) -> str:
    return f"exit_head_{exit_layer}.safetensors"


def prompt_sha256(token_ids: tuple[int, ...] | list[int]) -> str:
    """Return a short hash of a prompt's token ids, by which training prompts are recognised."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


def save_head(path: Path, head: nn.Module, facts: HeadFacts) -> str:
    """Write a head atomically and return the SHA-256 of its file; raise `ExitHeadError` if it cannot be written."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    content = save(tensors, metadata={METADATA_KEY: facts.model_dump_json(by_alias=True)})
    write_atomically(path, content, what="the exit head", error=ExitHeadError)
    return hashlib.sha256(content).hexdigest()


def read_facts(path: Path) -> HeadFacts:
    """Return a head's metadata without reading weights; raise `ExitHeadError` if the file is missing, damaged or not a head."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise ExitHeadError(f"no such exit head: {path}") from None
    except (SafetensorError, OSError) as cause:
        raise ExitHeadError(f"the exit head {path} is damaged: {cause}") from None
    if METADATA_KEY not in metadata:
        raise ExitHeadError(f"{path} is no exit head: it does not say for which model; `sdtune distill` writes them")
    try:
        facts = json.loads(metadata[METADATA_KEY])
    except ValueError:
        raise ExitHeadError(f"the exit head {path} is damaged: its metadata cannot be read") from None
    return validate(HeadFacts, facts, source=str(path), error=ExitHeadError)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a head's file; raise `ExitHeadError` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as cause:
        raise ExitHeadError(f"cannot read the exit head {path}: {cause.strerror or cause}") from None


def new_exit_head(target: Target) -> nn.Module:
    """Return a copy of the last block, in its precision, as a new head: the target's final norm and LM head follow it."""
    return copy.deepcopy(target.blocks[-1]).requires_grad_(True).eval()


def load_exit_head(path: Path, target: Target, exit_layer: int, model: Fingerprint | None = None) -> nn.Module:
    """Return the frozen head of one exit, in the precision and on the device of `target`.

    `model` is the target's fingerprint, computed if it is not given. Raises `ExitHeadError` for a missing or damaged file, and for
    a head of another model or exit.
    """
    facts = _facts_for(path, target, model)
    if facts.exit_layer != exit_layer:
        raise ExitHeadError(f"the exit head {path} is for exit layer {facts.exit_layer}, not {exit_layer}")
    head = new_exit_head(target)
    _load_weights(path, head)
    return head


def _facts_for(path: Path, target: Target, model: Fingerprint | None) -> HeadFacts:
    """Return a head's metadata; raise `ExitHeadError` unless it is a head for this model."""
    facts = read_facts(path)
    model = model or fingerprint(target.model)
    if (facts.config_sha256, facts.weights_sha256) != (model.config_sha256, model.weights_sha256):
        trained_for = facts.training.model if facts.training else f"a {facts.architecture} of {facts.num_layers} layers"
        raise ExitHeadError(
            f"the exit head {path} belongs to another model ({trained_for}): distil one for this model with "
            "`sdtune distill`"
        )
    return facts


def _load_weights(path: Path, block: nn.Module) -> None:
    """Load a head's weights into `block`, and freeze it."""
    block.requires_grad_(False)
    try:
        block.load_state_dict(load_file(path))
    except (SafetensorError, OSError, RuntimeError) as cause:
        raise ExitHeadError(f"the exit head {path} is damaged: {one_line(cause)}") from None
    if not all(torch.isfinite(parameter).all() for parameter in block.parameters()):
        raise ExitHeadError(f"the exit head {path} is damaged: it holds non-finite weights")


def check_head_file(path: Path, sha256: str) -> None:
    """Raise `ExitHeadError` unless the file at `path` is the one with this hash."""
    if not path.exists():
        raise ExitHeadError(f"no such exit head: {path}; it belongs beside the profile that names it")
    if file_sha256(path) != sha256:
        raise ExitHeadError(f"the exit head {path} is not the one the profile was tuned with: its contents differ")
