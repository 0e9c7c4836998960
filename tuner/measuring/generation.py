"""transformers' own `generate` as a contender: greedy, streamed into the recorder, with options of transformers.

In transformers 5.23 a streamer receives the prompt first, then the tokens of each pass: one, or several where drafts were
accepted. Assisted generation drafts before its first pass over the prompt, which verifies these drafts; it refuses batches. For a
batch the streamer receives the padded prompts, then one token per sequence and pass, with padding for ended sequences.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
from tuner.measuring.turns import Interleaved

# The model's own settings that are kept: special tokens and drafting. Any other setting could change the tokens.
DRAFTING_SETTINGS = (
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
)
KEPT_SETTINGS = ("bos_token_id", "pad_token_id", *DRAFTING_SETTINGS)

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup copies: the number in transformers' documentation and its candidate generator's default."""
ONE_SEQUENCE = "transformers does not support it: its assisted generation decodes one sequence at a time"
"""Why assisted generation has no batches."""
EXIT_EIGHTHS = (1, 2, 3, 4, 5, 6)
"""Exits to try, in eighths of the model: after three quarters hardly any time can be saved."""
CHOICE_TOKENS = 48
"""Most tokens of each prompt that exits are tried on: on a model not trained for early exit, all of them are several times slower
than plain decoding, and the choice would take longer than the comparison."""


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
        """Options, and the model's own drafting settings, which `generate` reads (null is the default of transformers)."""
        return {"options": self._options, "generation_config": drafting_settings(self._model)}

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


def drafting_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's own drafting settings; None for a setting that is absent."""
    return {name: getattr(model.generation_config, name, None) for name in DRAFTING_SETTINGS}


def stock_generate(name: str, model: PreTrainedModel, eos_token_ids: frozenset[int]) -> StockGeneration:
    """Return `generate` as it is."""
    return StockGeneration(
        name, model, eos_token_ids, "transformers' generate, greedy, with its default (dynamic) cache"
    )


def stock_prompt_lookup(name: str, model: PreTrainedModel, eos_token_ids: frozenset[int]) -> StockGeneration:
    """Return `generate` with its own prompt lookup, which decodes one sequence at a time."""
    longest = getattr(model.generation_config, "max_matching_ngram_size", None)
    ngrams = f"n-grams of up to {longest}" if longest else "n-grams as by default"
    description = f"generate(prompt_lookup_num_tokens={LOOKUP_TOKENS}), {ngrams}"
    return StockGeneration(name, model, eos_token_ids, description, {"prompt_lookup_num_tokens": LOOKUP_TOKENS})


class EarlyExitGeneration(StockGeneration):
    """`model.generate(..., assistant_early_exit=N)`: the first N layers draft, the whole model verifies."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        eos_token_ids: frozenset[int],
        exit_layer: int,
        tried: Mapping[int, float] | None = None,
    ) -> None:
        """Take the tokens per second of the exits that were `tried`, of which this one was chosen."""
        description = f"generate(assistant_early_exit={exit_layer})"
        if tried:
            rates = ", ".join(f"{each}: {rate:.1f}" for each, rate in tried.items())
            description += f", the fastest on tuning prompts (tok/s of each exit tried: {rates}); drafting as its"
            description += " generation_config says"
        super().__init__(name, model, eos_token_ids, description, {"assistant_early_exit": exit_layer})
        self._tried = tried or {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """Options, and tokens per second of the exits tried."""
        return {**super().settings, "tried": {str(exit_layer): rate for exit_layer, rate in self._tried.items()}}

    def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
        """See `Contender.decode`; restores the number of layers, which transformers leaves reduced after an error."""
        config: Any = self._model.base_model.config
        num_layers = config.num_hidden_layers
        try:
            return super().decode(prompts, max_new_tokens)
        finally:
            config.num_hidden_layers = num_layers


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


def exits_to_try(num_layers: int) -> tuple[int, ...]:
    """Return exits spread over a model with `num_layers` layers, ascending; none for a single layer."""
    exits = {round(num_layers * eighths / 8) for eighths in EXIT_EIGHTHS}
    return tuple(sorted(each for each in exits if 1 <= each < num_layers))


def fastest_exit(
    name: str,
    model: PreTrainedModel,
    eos_token_ids: frozenset[int],
    prompts: Sequence[Sequence[int]],
    num_layers: int,
    max_new_tokens: int,
) -> EarlyExitGeneration:
    """Return the exit that decodes these prompts fastest; all are tried in turns, on at most `CHOICE_TOKENS` tokens of each.

    Raises ValueError with the reason if there is no exit to try or none runs.
    """
    exits = {str(n): EarlyExitGeneration(str(n), model, eos_token_ids, n) for n in exits_to_try(num_layers)}
    if not exits:
        raise ValueError(f"a model of {num_layers} layer has no exit")
    turns = Interleaved(list(exits.values()), may_fail=exits)
    batches = [(index, [prompt]) for index, prompt in enumerate(prompts)]
    seconds, tokens = defaultdict[str, float](float), Counter[str]()

    def note(index: int, done: Mapping[str, Decoded]) -> None:
        for each, decoded in done.items():
            seconds[each] += decoded.decode_seconds
            tokens[each] += decoded.decode_tokens

    turns.warm_up([batch for _, batch in batches[:1]])
    if turns.running:
        turns.take(batches, min(max_new_tokens, CHOICE_TOKENS), note)
    if not turns.running:
        raise ValueError("no exit runs: " + "; ".join(dict.fromkeys(turns.left_out.values())))
    # Every token may have arrived with the prefill.
    tried = {int(each): tokens[each] / seconds[each] if seconds[each] else 0.0 for each in turns.running}
    return EarlyExitGeneration(name, model, eos_token_ids, max(tried, key=lambda each: tried[each]), tried)
