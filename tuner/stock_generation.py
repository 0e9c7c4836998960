"""transformers' own `generate` as a contender: greedy, streamed into the stopwatch, with one or another option of its own.

As read in transformers 5.23: a streamer is given the prompt first, then the tokens of each pass, one, or several where drafts were
accepted. Assisted generation drafts before its first pass over the prompt, which verifies these drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from tuner.contest import Contest, Stopwatch, Writing
from tuner.loading import quiet

# All that is kept of a model's own settings: marks of text, and how drafts are made. Others would make it another text.
DRAFTING_SETTINGS = (
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
)
KEPT_SETTINGS = ("bos_token_id", "pad_token_id", *DRAFTING_SETTINGS)

LOOKUP_TOKENS = 10
"""Tokens that prompt lookup copies: the number in transformers' documentation and its candidate generator's default."""
EXIT_EIGHTHS = (1, 2, 3, 4, 5, 6)
"""Exits to try, in eighths of the model: behind three quarters there is hardly a pass to be saved."""


class StockGeneration:
    """`model.generate(..., **options)`."""

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: frozenset[int],
        description: str,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model = model
        self._eos = sorted(eos_token_ids)
        self._description = description
        self._options = dict(options or {})

    same_as: str | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options, and the model's own settings that it drafts by (null: the default of transformers)."""
        return {"options": self._options, "generation_config": self.drafting_settings()}

    def drafting_settings(self) -> dict[str, Any]:
        """What the model's own generation settings say of drafting, read by `generate`; None where they say nothing."""
        return {name: getattr(self._model.generation_config, name, None) for name in DRAFTING_SETTINGS}

    def describe(self) -> str:
        """What it is, for the table."""
        return self._description

    def write(self, prompt: Sequence[int], max_new_tokens: int, watch: Stopwatch) -> None:
        """See `Contender.write`; the model's generation settings are put back."""
        token_ids = torch.tensor([list(prompt)], device=self._model.device)
        with self._greedy():
            self._model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=max_new_tokens,
                streamer=_Streamer(watch),
                **self._options,
            )

    @contextmanager
    def _greedy(self) -> Iterator[None]:
        """Generation settings that end texts where ours end and choose tokens as ours do, a fresh copy for each text.

        Those of the model count even for settings that a caller gives, and the drafting ones are read from nowhere else: they
        must be the model's own while it runs.
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


class EarlyExitGeneration(StockGeneration):
    """`model.generate(..., assistant_early_exit=N)`: the first N layers draft, the whole model verifies."""

    def __init__(
        self, model: PreTrainedModel, eos_token_ids: frozenset[int], exit_layer: int, tried: Mapping[int, float]
    ) -> None:
        rates = ", ".join(f"{each}: {rate:.1f}" for each, rate in tried.items())
        description = f"generate(assistant_early_exit={exit_layer})"
        if tried:
            description += f", the fastest on tuning prompts (tok/s of each exit tried: {rates}); drafting as its"
            description += " generation_config says"
        super().__init__(model, eos_token_ids, description, {"assistant_early_exit": exit_layer})
        self._tried = dict(tried)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The options, and tokens per second of the exits that were tried."""
        return {**super().settings, "tried": {str(exit_layer): rate for exit_layer, rate in self._tried.items()}}

    def write(self, prompt: Sequence[int], max_new_tokens: int, watch: Stopwatch) -> None:
        """See `Contender.write`; after an error transformers leaves the number of layers cut short, so that it is put back here."""
        config: Any = self._model.base_model.config
        num_layers = config.num_hidden_layers
        try:
            super().write(prompt, max_new_tokens, watch)
        finally:
            config.num_hidden_layers = num_layers


class _Streamer(BaseStreamer):
    """Hands over what is generated, and drops the prompt, which comes first."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._saw_prompt = False

    def put(self, value: Tensor) -> None:
        """Called by `generate` with token ids on the host: the prompt's [1, length], then those of each pass, [1] or [1, width]."""
        if self._saw_prompt:
            self._watch.put(value.flatten().tolist())
        self._saw_prompt = True

    def end(self) -> None:
        """Nothing: the last tokens have been handed over."""


def exits_to_try(num_layers: int) -> tuple[int, ...]:
    """A spread of exits of a model with `num_layers` layers, ascending; none if it has but one."""
    exits = {round(num_layers * eighths / 8) for eighths in EXIT_EIGHTHS}
    return tuple(sorted(each for each in exits if 1 <= each < num_layers))


def fastest_exit(
    model: PreTrainedModel,
    eos_token_ids: frozenset[int],
    prompts: Sequence[Sequence[int]],
    *,
    num_layers: int,
    max_new_tokens: int,
    on_text: Callable[[], None],
) -> EarlyExitGeneration:
    """The exit that decodes these prompts fastest, all tried side by side; `on_text` is called after each prompt.

    Raises `ValueError` if there is none to try or none runs, with the reason.
    """
    exits = {str(n): EarlyExitGeneration(model, eos_token_ids, n, {}) for n in exits_to_try(num_layers)}
    if not exits:
        raise ValueError(f"a model of {num_layers} layer has no exit")
    contest = Contest(exits, model.device)
    contest.warm_up(prompts[:1])
    if not contest.running:
        raise ValueError(_reasons(contest))
    writings: dict[str, list[Writing]] = {name: [] for name in exits}

    def note(place: int, repeat: int, texts: Mapping[str, Writing]) -> None:
        for name, text in texts.items():
            writings[name].append(text)
        on_text()

    contest.hold(prompts, max_new_tokens=max_new_tokens, on_texts=note)
    tried = {int(name): _rate(writings[name]) for name in contest.running}
    if not tried:
        raise ValueError(_reasons(contest))
    return EarlyExitGeneration(model, eos_token_ids, max(tried, key=lambda each: tried[each]), tried)


def _reasons(contest: Contest) -> str:
    return "no exit runs: " + "; ".join(dict.fromkeys(contest.left_out.values()))


def _rate(writings: Sequence[Writing]) -> float:
    """Tokens per second of the decode phase; 0 where all was written with the prefill, of which nothing can be said."""
    seconds = sum(each.decode_seconds for each in writings)
    return sum(each.num_decoded for each in writings) / seconds if seconds else 0.0
