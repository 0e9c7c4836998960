"""The target writes the texts that heads learn from, in batches, each on disk before the next is begun.

Texts are sampled by transformers' `generate` from the softmax at one temperature: no top-k, penalty or other setting that a
checkpoint brings along shapes them, as none shapes the labels either.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from decoding.errors import DistillationError
from decoding.fingerprint import Fingerprint
from decoding.target import Target

SCHEMA = "sdtune-texts/v1"


@dataclass(frozen=True)
class WrittenText:
    """A prompt and what the target wrote behind it, as token ids; an end-of-text token is part of the response."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    seconds: float = field(default=0.0, compare=False)
    """Its share of the time that its batch took to write."""


@dataclass(frozen=True)
class TextPlan:
    """What is to be written: this decides every token."""

    prompts: tuple[tuple[int, ...], ...]
    samples: int
    """Texts of each prompt."""
    temperature: float
    """0 is greedy."""
    response_tokens: int
    """Most tokens behind a prompt; fewer where the model's context ends."""
    batch_size: int
    """Texts written at a time."""
    seed: int

    @property
    def batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The prompts of each batch, in the order of writing: of like lengths, as the shorter ones are padded."""
        jobs = [prompt for prompt in sorted(self.prompts, key=len) for _ in range(self.samples)]
        return tuple(tuple(jobs[first : first + self.batch_size]) for first in range(0, len(jobs), self.batch_size))

    def identity(self, model: Fingerprint, dtype: torch.dtype) -> dict[str, Any]:
        """What texts on disk must agree in to be the ones meant."""
        return {
            "model": [model.config_sha256, model.weights_sha256],
            "precision": str(dtype).removeprefix("torch."),
            "prompts": hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest(),
            "samples": self.samples,
            "temperature": self.temperature,
            "response_tokens": self.response_tokens,
            "writing_batch_size": self.batch_size,
            "seed": self.seed,
        }


def write_texts(
    target: Target,
    writing: TextPlan,
    path: Path,
    identity: dict[str, Any],
    on_progress: Callable[[int], None] = lambda num_texts: None,
) -> list[WrittenText]:
    """All texts of `writing`: those that an earlier run left in `path` are read, the others written and added to the file.

    `on_progress` is told how many texts came to be known. Raises `DistillationError` if the file cannot be written, is damaged,
    or holds texts of another identity.
    """
    texts = _open(path, identity, writing)
    on_progress(len(texts))
    first = 0
    for number, batch in enumerate(writing.batches):
        if first >= len(texts):
            written = write_batch(target, batch, writing, number)
            _append(path, written)
            texts += written
            on_progress(len(batch))
        first += len(batch)
    return texts


def write_batch(
    target: Target, prompts: Sequence[tuple[int, ...]], writing: TextPlan, number: int
) -> list[WrittenText]:
    """One text of each of `prompts`. The batch's number seeds the sampling, so that a resumed run writes the same texts."""
    longest = max(map(len, prompts))
    room = writing.response_tokens
    if target.context_length is not None:
        room = min(room, target.context_length - longest)
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    known = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    model = _generating_plainly(target, writing.temperature, room)
    began = time.perf_counter()
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(_batch_seed(writing.seed, number))
        ids = model.generate(
            torch.tensor(padded, device=target.device), attention_mask=torch.tensor(known, device=target.device)
        )
    eos = model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [eos])
    rows = ids[:, longest:].tolist()
    seconds = (time.perf_counter() - began) / len(prompts)
    return [WrittenText(prompt, _up_to(ends, row), seconds) for prompt, row in zip(prompts, rows, strict=True)]


def _generating_plainly(target: Target, temperature: float, max_new_tokens: int) -> Any:
    """The model with other generation settings: what a call leaves open, `generate` takes from those that the model has."""
    model, own = copy.copy(target.model), target.model.generation_config
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    model.generation_config = GenerationConfig(
        eos_token_id=own.eos_token_id,
        pad_token_id=0 if own.pad_token_id is None else own.pad_token_id,
        max_new_tokens=max_new_tokens,
        **sampling,
    )
    return model


def _batch_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{number}".encode()).digest()[:4])


def _up_to(ends: frozenset[int], tokens: list[int]) -> tuple[int, ...]:
    """The tokens up to the first that ends a text, and that one."""
    place = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: place + 1])


# --- the file -----------------------------------------------------------------------------------------------------------


def _open(path: Path, identity: dict[str, Any], writing: TextPlan) -> list[WrittenText]:
    """The texts of whole batches in `path`; what a kill left behind them is cut off, and a new file is given its header."""
    header = json.dumps({"schema": SCHEMA, **identity}).encode() + b"\n"
    try:
        content = path.read_bytes() if path.exists() else b""
        lines = content.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(header)
            return []
        if lines[0] != header:
            raise DistillationError(
                f"{path} holds other texts than the ones asked for: remove it, or use another folder"
            )
        texts = [_parse(line, number, path) for number, line in enumerate(lines[1:], start=2)]
        expected = [prompt for batch in writing.batches for prompt in batch]
        if [text.prompt for text in texts] != expected[: len(texts)]:
            raise DistillationError(
                f"the texts in {path} are damaged: their prompts are not the ones that were asked for"
            )
        kept = _whole_batches(writing, len(texts))
        with path.open("r+b") as file:
            file.truncate(sum(map(len, lines[: kept + 1])))
    except OSError as cause:
        raise _unusable(path, cause) from None
    return texts[:kept]


def _whole_batches(writing: TextPlan, num_texts: int) -> int:
    """How many of the first `num_texts` texts stand in batches that are complete."""
    kept = 0
    for batch in writing.batches:
        if kept + len(batch) > num_texts:
            break
        kept += len(batch)
    return kept


def _parse(line: bytes, number: int, path: Path) -> WrittenText:
    try:
        data = json.loads(line)
        text = WrittenText(tuple(data["prompt"]), tuple(data["response"]), float(data["seconds"]))
        if not text.response or not all(isinstance(token, int) for token in (*text.prompt, *text.response)):
            raise ValueError("no token ids")
    except (ValueError, TypeError, KeyError):
        raise DistillationError(
            f"the texts in {path} are damaged in line {number}: remove the file, and they are written anew"
        ) from None
    return text


def _append(path: Path, texts: Sequence[WrittenText]) -> None:
    lines = [json.dumps(asdict(text)) + "\n" for text in texts]
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
    except OSError as cause:
        raise _unusable(path, cause) from None


def _unusable(path: Path, cause: OSError) -> DistillationError:
    return DistillationError(f"cannot write the texts {path}: {cause.strerror or cause}")
