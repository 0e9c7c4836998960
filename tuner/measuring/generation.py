"""transformers' own `generate` as a contender: greedy, streamed into the recorder, with options of transformers.

In transformers 5.23 a streamer receives the prompt first, then the tokens of each pass: one, or several where drafts were
accepted. Assisted generation drafts before its first pass over the prompt, which verifies these drafts; it refuses batches. For a
batch the streamer receives the padded prompts, then one token per sequence and pass, with padding for ended sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from decoding.target.attention import attention_backends
from tuner.inputs.models import quiet
from tuner.measuring.contender import Decoded, Prompts, Recorder, WallClock

LONGEST_NGRAM = "max_matching_ngram_size"
KEPT_SETTINGS = ("bos_token_id", "pad_token_id", LONGEST_NGRAM)
"""The model's own settings that are kept: special tokens and drafting. Any other setting could change the tokens."""

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup copies: the number in transformers' documentation and its candidate generator's default."""
ONE_SEQUENCE = "transformers does not support it: its assisted generation decodes one sequence at a time"
"""Why assisted generation has no batches."""


class StockGeneration:
    """`model.generate(..., **options)`; see `Contender`."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        eos_token_ids: frozenset[int],
        description: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.description = name, description
        self._model, self._eos = model, sorted(eos_token_ids)
        self._options = dict(options or {})

    @property
    def settings(self) -> Mapping[str, Any]:
        """Options, and the model's own drafting setting, which `generate` reads (null is the default of transformers)."""
        own = {LONGEST_NGRAM: getattr(self._model.generation_config, LONGEST_NGRAM, None)}
        return {"options": self._options, "generation_config": own}

    def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
        """Do nothing: `generate` has no preparation of its own, and the warm-up on the longest and shortest batch follows."""

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        """See `Contender.decode`; the model's generation settings are put back. Shorter prompts are padded on the left."""
        recorder = Recorder(WallClock(self._model.device).start(), num_sequences=len(prompts))
        with self._greedy(), attention_backends(self._model.device):
            token_ids, mask = _padded(prompts, self._model.generation_config.pad_token_id or 0)
            self._model.generate(
                token_ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max_new_tokens,
                streamer=_Streamer(recorder, len(prompts), self._eos),
                **self._options,
            )
        return recorder.decoded()

    @contextmanager
    def _greedy(self) -> Iterator[None]:
        """Give the model generation settings that choose and end sequences as our loops do; a fresh copy for each batch.

        transformers applies the model's settings even beside given ones, and reads drafting settings nowhere else: the model itself
        must carry them while it runs.
        """
        own = self._model.generation_config
        kept = {name: value for name in KEPT_SETTINGS if (value := getattr(own, name, None)) is not None}
        pad = {"pad_token_id": self._eos[0]} if self._eos else {}
        self._model.generation_config = GenerationConfig(
            eos_token_id=self._eos or None, do_sample=False, **{**pad, **kept}
        )
        try:
            with quiet():
                yield
        finally:
            self._model.generation_config = own


def stock_generate(name: str, model: PreTrainedModel, eos_token_ids: frozenset[int]) -> StockGeneration:
    """Return `generate` as it is."""
    return StockGeneration(
        name, model, eos_token_ids, "transformers' generate, greedy, with its default (dynamic) cache"
    )


def stock_prompt_lookup(name: str, model: PreTrainedModel, eos_token_ids: frozenset[int]) -> StockGeneration:
    """Return `generate` with its own prompt lookup, which decodes one sequence at a time."""
    longest = getattr(model.generation_config, LONGEST_NGRAM, None)
    ngrams = f"n-grams of up to {longest}" if longest else "n-grams as by default"
    description = f"generate(prompt_lookup_num_tokens={LOOKUP_TOKENS}), {ngrams}"
    return StockGeneration(name, model, eos_token_ids, description, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})


class _Streamer(BaseStreamer):
    """Records generated tokens; drops the prompts, which arrive first, and the padding after the end of a sequence."""

    def __init__(self, recorder: Recorder, num_sequences: int, eos_token_ids: Collection[int]) -> None:
        self._recorder = recorder
        self._eos = frozenset(eos_token_ids)
        self._writing = list(range(num_sequences))
        self._saw_prompts = False

    def put(self, value: Tensor) -> None:
        """Record one pass. `generate` calls this with token ids on the host.

        First come the prompts [sequences, length], then each pass: [sequences], or [1, width] for a single sequence.
        """
        if self._saw_prompts:
            passed = value.reshape(-1, 1) if value.ndim == 1 else value
            for text in self._writing:
                self._recorder.put(passed[text].tolist(), text)
            self._writing = [text for text in self._writing if self._eos.isdisjoint(passed[text].tolist())]
        self._saw_prompts = True

    def end(self) -> None:
        """Do nothing: the last tokens have been recorded."""


def _padded(prompts: Prompts, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids [sequences, length], padded on the left, and their attention mask."""
    longest = max(len(prompt) for prompt in prompts)
    token_ids = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(token_ids), torch.tensor(mask)
