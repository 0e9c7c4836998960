"""The held-out prompts as a benchmark file: JSONL with `prompt` and `output_tokens`, for `vllm bench serve` and GuideLLM.

Random text says nothing about a draft: hardly any of its tokens are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import DatasetError
from tuner.inputs.held_out import find_prompts

if TYPE_CHECKING:
    from decoding.profile import DatasetFacts
    from tuner.export.settings import ExportSettings
    from tuner.inputs.models import Loaded
    from tuner.inputs.prompts import Prompt

FILE = "prompts.jsonl"
USUAL_NEW_TOKENS = 128


@dataclass(frozen=True)
class BenchPrompts:
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    note: str

    def lines(self, tokenizer: Any) -> Iterator[str]:
        """Yield the JSON of each prompt whose text an engine encodes as the same token ids."""
        for prompt in self.prompts:
            text = _text_of(prompt, tokenizer)
            if text is not None:
                yield json.dumps({"prompt": text, "output_tokens": self.max_new_tokens}, ensure_ascii=False)


def bench_prompts(settings: ExportSettings, facts: DatasetFacts | None, loaded: Loaded) -> BenchPrompts | None:
    """Return the held-out prompts; None if no dataset is given and the profile's is not the one that it was tuned on.

    Raises `DatasetError` for a dataset that is given and cannot be read.
    """
    if settings.prompts is not None:
        return _found(settings, settings.prompts, facts, loaded)[1]
    if facts is None:
        return None
    try:
        are_held_out, prompts = _found(settings, facts.name, facts, loaded)
    except DatasetError:
        return None
    return prompts if are_held_out else None


def _found(
    settings: ExportSettings, source: str, facts: DatasetFacts | None, loaded: Loaded
) -> tuple[bool, BenchPrompts]:
    max_new_tokens = facts.max_new_tokens if facts else USUAL_NEW_TOKENS
    found = find_prompts(
        source,
        loaded.tokenizer,
        facts,
        settings,
        num_tuning=settings.tuning_prompts,
        num_held_out=settings.held_out_prompts,
        max_new_tokens=max_new_tokens,
        context_length=getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None),
        seed=settings.seed,
    )
    return found.are_held_out, BenchPrompts(found.prompts.held_out, max_new_tokens, found.origin)


def _text_of(prompt: Prompt, tokenizer: Any) -> str | None:
    """Return a text that the tokenizer turns into the prompt's token ids, special tokens included; None if there is none."""
    ids = list(prompt.token_ids)
    for text in (prompt.text, tokenizer.decode(ids), tokenizer.decode(ids[1:])):
        if list(tokenizer(text)["input_ids"]) == ids:
            return str(text)
    return None
