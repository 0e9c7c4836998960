"""Arguments of `generate` that transformers does not hand to a custom decoder, in a form that it does hand on.

`generate` drops `streamer` and `tokenizer` before it calls a custom decoder, and then builds the criterion of stop strings without
the tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, StoppingCriteriaList, StopStringCriteria

from decoding.errors import UnsupportedRequestError

OnTokens = Callable[[tuple[int, ...]], None]


def streaming_to(streamer: BaseStreamer, on_tokens: OnTokens | None) -> OnTokens:
    """Return a callback that puts the tokens of a round into `streamer` one by one, as `generate` does, then calls `on_tokens`."""

    def put(tokens: tuple[int, ...]) -> None:
        for token in tokens:
            streamer.put(torch.tensor([token]))
        if on_tokens is not None:
            on_tokens(tokens)

    return put


def with_stop_strings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `generate`'s arguments with stop strings as a stopping criterion, wherever they were set.

    Raises `UnsupportedRequestError` if there are stop strings and no tokenizer.
    """
    arguments = dict(arguments)
    config, own = arguments.get("generation_config"), model.generation_config.stop_strings
    strings = _first([arguments.pop("stop_strings", None), None if config is None else config.stop_strings, own])
    if strings is None:
        return arguments
    if tokenizer is None:
        raise UnsupportedRequestError("stop_strings need the model's tokenizer: pass tokenizer=")
    if config is not None:
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if own is not None:
        arguments["stop_strings"] = None  # else `generate` would take them from the model's configuration
    criteria = arguments.get("stopping_criteria") or ()
    arguments["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])
    return arguments


def _first(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)
