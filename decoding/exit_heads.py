"""Trained heads on disk: one safetensors file per exit head, whose metadata names the model and the training.

`decoding.target` knows the modules of heads, `tuner.heads` their training, `decoding.head_folder` a folder of heads.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from decoding.documents.atomic_write import write_atomically
from decoding.documents.strict_yaml import Document, validate
from decoding.errors import ExitHeadError, one_line
from decoding.fingerprint import Fingerprint, fingerprint
from decoding.target import DraftVocabulary, ExitHead, Target
from decoding.target.heads import new_exit_head

METADATA_KEY = "sdtune"
VOCABULARY_KEY = "sdtune_draft_vocabulary"
"""Name of the tensor of token ids that a head drafts from, beside its weights."""


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


class HeadFacts(Document):
    """Metadata of a head's file."""

    schema_: Literal["sdtune-exit-head/v1"] = Field("sdtune-exit-head/v1", alias="schema")
    exit_layer: int = Field(ge=1, description="number of blocks before the head")
    num_layers: int
    architecture: str
    config_sha256: str
    weights_sha256: str
    draft_vocabulary: int | None = Field(None, ge=1, description="number of tokens that it drafts from; None for all")
    training: HeadTraining | None = None


def head_name(exit_layer: int) -> str:
    return f"exit_head_{exit_layer}.safetensors"


def prompt_sha256(token_ids: tuple[int, ...] | list[int]) -> str:
    """Return a short hash of a prompt's token ids, by which training prompts are recognised."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


def save_head(path: Path, head: ExitHead, facts: HeadFacts) -> str:
    """Write a head atomically and return the SHA-256 of its file; raise `ExitHeadError` if it cannot be written."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.block.state_dict().items()}
    if head.vocabulary is not None:
        tensors[VOCABULARY_KEY] = torch.tensor(head.vocabulary.token_ids, dtype=torch.int32)
        facts = facts.model_copy(update={"draft_vocabulary": len(head.vocabulary.token_ids)})
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


def load_exit_head(path: Path, target: Target, exit_layer: int, model: Fingerprint | None = None) -> ExitHead:
    """Return the frozen head of one exit, in the precision and on the device of `target`.

    `model` is the target's fingerprint, computed if it is not given. Raises `ExitHeadError` for a missing or damaged file, and for
    a head of another model or exit.
    """
    facts = _facts_for(path, target, model)
    if facts.exit_layer != exit_layer:
        raise ExitHeadError(f"the exit head {path} is for exit layer {facts.exit_layer}, not {exit_layer}")
    head = new_exit_head(target)
    return ExitHead(head.block, _load_weights(path, facts, head.block, target))


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


def _load_weights(path: Path, facts: HeadFacts, block: nn.Module, target: Target) -> DraftVocabulary | None:
    """Load a head's weights into `block`, freeze it, and return the tokens that it drafts from."""
    block.requires_grad_(False)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        token_ids = tensors.pop(VOCABULARY_KEY, None)
        block.load_state_dict(tensors)
    except (SafetensorError, OSError, RuntimeError) as cause:
        raise ExitHeadError(f"the exit head {path} is damaged: {one_line(cause)}") from None
    if not all(torch.isfinite(parameter).all() for parameter in block.parameters()):
        raise ExitHeadError(f"the exit head {path} is damaged: it holds non-finite weights")
    vocabulary = None if token_ids is None else DraftVocabulary(tuple(token_ids.tolist()))
    _check_vocabulary(path, vocabulary, facts, target)
    return vocabulary


def _check_vocabulary(path: Path, vocabulary: DraftVocabulary | None, facts: HeadFacts, target: Target) -> None:
    """Raise `ExitHeadError` unless the tokens are as many as the file says, ascending, and the model's."""
    token_ids = vocabulary.token_ids if vocabulary else ()
    ascends = all(one < other for one, other in pairwise(token_ids))
    within = not token_ids or (token_ids[0] >= 0 and token_ids[-1] < target.config.vocab_size)
    if len(token_ids) != (facts.draft_vocabulary or 0) or not ascends or not within:
        raise ExitHeadError(f"the exit head {path} is damaged: its draft vocabulary is not one of this model")


def check_head_file(path: Path, sha256: str) -> None:
    """Raise `ExitHeadError` unless the file at `path` is the one with this hash."""
    if not path.exists():
        raise ExitHeadError(f"no such exit head: {path}; it belongs beside the profile that names it")
    if file_sha256(path) != sha256:
        raise ExitHeadError(f"the exit head {path} is not the one the profile was tuned with: its contents differ")
