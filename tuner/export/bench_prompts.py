"""The held-out prompts as a benchmark file: JSONL with `prompt` and `output_tokens`, for `vllm bench serve` and GuideLLM.

Random text says nothing about a draft: hardly any of its tokens are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.errors import DatasetError
from tuner.inputs.prompts import load_prompts

if TYPE_CHECKING:
    from decoding.profile import DatasetFacts
    from tuner.export.settings import ExportSettings
    from tuner.inputs.models import Loaded
    from tuner.inputs.prompts import PromptSet
    from tuner.inputs.reading import Prompt

FILE = "prompts.jsonl"
USUAL_PROMPTS, USUAL_NEW_TOKENS = 24, 128


@dataclass(frozen=True)
class BenchPrompts:
    """Prompts for a benchmark, and where they are from."""

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
        found, max_new_tokens = _draw(settings, settings.prompts, facts, loaded)
        held_out = facts is not None and found.fingerprint == facts.fingerprint
        origin = (
            "held out by the search" if held_out else "not the split of the search, which may have seen some of them"
        )
        return BenchPrompts(found.held_out, max_new_tokens, origin)
    if facts is None:
        return None
    try:
        found, max_new_tokens = _draw(settings, facts.name, facts, loaded)
    except DatasetError:
        return None
    if found.fingerprint != facts.fingerprint:
        return None
    return BenchPrompts(found.held_out, max_new_tokens, "held out by the search")


def _draw(settings: ExportSettings, source: str, facts: DatasetFacts | None, loaded: Loaded) -> tuple[PromptSet, int]:
    max_new_tokens = facts.max_new_tokens if facts else USUAL_NEW_TOKENS
    found = load_prompts(
        source,
        loaded.tokenizer,
        num_tuning=settings.tuning_prompts or (facts.tuning_prompts if facts else USUAL_PROMPTS),
        num_held_out=settings.held_out_prompts or (facts.held_out_prompts if facts else USUAL_PROMPTS),
        max_new_tokens=max_new_tokens,
        context_length=getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None),
        seed=settings.seed,
        settings=settings,
    )
    return found, max_new_tokens


def _text_of(prompt: Prompt, tokenizer: Any) -> str | None:
    """Return a text that the tokenizer turns into the prompt's token ids, special tokens included; None if there is none."""
    ids = list(prompt.token_ids)
    for text in (prompt.text, tokenizer.decode(ids), tokenizer.decode(ids[1:])):
        if list(tokenizer(text)["input_ids"]) == ids:
            return str(text)
    return None
