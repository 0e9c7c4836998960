"""Conversion of the arguments of transformers' `generate` into `Request`s, one per batch row.

`generate` drops `streamer` and `tokenizer` before it calls a custom decoder, and then builds the criterion of stop strings without
the tokenizer: these two are brought into a form that it does hand on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decoding.acceptance import Greedy, Sampling
from decoding.cache.earlier_turns import EarlierTurns, unreadable_reason
from decoding.errors import UnsupportedRequestError
from decoding.text import Ending, Request, Shaping

OnTokens = Callable[[tuple[int, ...]], None]

# Arguments that `generate` prepares for its own loops; the loops here make their own.
PREPARED_KWARGS = frozenset({"past_key_values", "position_ids", "logits_to_keep", "use_cache", "token_type_ids"})

FEW_TOKENS = 4
"""Number of tokens on which token types are tried."""

# These processors count calls or keep their own cache: they would treat drafts as generated tokens.
STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def requests_of(
    input_ids: Tensor,
    config: GenerationConfig,
    processors: Sequence[Callable[..., Tensor]],
    criteria: Sequence[Callable[..., Any]],
    kwargs: dict[str, Any],
) -> list[Request]:
    """Return one request per row of `input_ids` [batch, length].

    Rows are left-padded where `attention_mask` in `kwargs` is 0. Raises `UnsupportedRequestError` for beam search, inputs other
    than token ids, logits processors that remember their calls, and a filled cache that the prompt does not continue.
    """
    _refuse_unsupported(config, kwargs)
    _refuse_stateful(processors)
    masks = kwargs.get("attention_mask")
    turns = _turns(input_ids, config, kwargs.get("past_key_values"), masks)
    _refuse_own_positions(input_ids, masks, kwargs.get("position_ids"))
    requests = []
    for row in range(input_ids.shape[0]):
        prompt = _without_padding(input_ids[row], None if masks is None else masks[row])
        seen = _as_in_batch(input_ids, row, len(prompt))
        requests.append(
            Request(
                prompt=prompt,
                ending=_ending(input_ids.shape[1], config, criteria, seen),
                acceptance=Sampling() if config.do_sample else Greedy(),
                shaping=Shaping(tuple(seen(process) for process in processors)),
                turns=turns,
            )
        )
    return requests


def _refuse_unsupported(config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    if config.num_beams not in (None, 1):
        raise UnsupportedRequestError(f"the decoder needs num_beams=1, got {config.num_beams}")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise UnsupportedRequestError(f"the decoder does not collect scores or states: {name} must be off")
    if config.prefill_chunk_size is not None:
        raise UnsupportedRequestError(
            f"the decoder reads prompts in pieces of its own: leave prefill_chunk_size out, got {config.prefill_chunk_size}"
        )
    foreign = [
        key for key, value in kwargs.items() if value is not None and key not in {*PREPARED_KWARGS, "attention_mask"}
    ]
    if foreign:
        raise UnsupportedRequestError(
            f"the decoder drafts token ids, it cannot use {', '.join(sorted(foreign))}: pass the token ids as input_ids"
        )


def _refuse_own_positions(input_ids: Tensor, masks: Tensor | None, positions: Tensor | None) -> None:
    """Refuse positions other than those that `generate` counts: a drafted sequence has no gaps."""
    if positions is None or positions.ndim != 2:
        return
    rows, length = input_ids.shape
    counted = torch.arange(length, device=input_ids.device).expand(rows, -1)
    is_read = torch.ones_like(input_ids, dtype=torch.bool)
    if masks is not None and masks.shape == input_ids.shape:
        is_read = masks.bool()
        counted = is_read.long().cumsum(dim=1) - 1
    width = min(positions.shape[1], length)  # those of a conversation are of its new tokens
    given, expected, counts = positions[:, -width:], counted[:, -width:], is_read[:, -width:]
    if not torch.equal(given.expand(rows, -1)[counts], expected[counts]):
        raise UnsupportedRequestError(
            "the decoder counts positions itself: leave position_ids out, or give them without gaps"
        )


@torch.inference_mode()
def refuse_token_types(model: Any, input_ids: Tensor, token_types: Tensor | None) -> None:
    """Refuse token types that change what the model computes: drafted tokens have none.

    Zeros change nothing in families for which they are the default, which is found by running a few of the tokens.
    """
    if token_types is None or "token_type_ids" not in signature(model.forward).parameters:
        return
    if not bool(token_types.any()):
        some, zeros = input_ids[:, -FEW_TOKENS:], token_types[:, -FEW_TOKENS:]
        given = model(input_ids=some, token_type_ids=zeros, use_cache=False).logits
        if torch.equal(given, model(input_ids=some, use_cache=False).logits):
            return
    raise UnsupportedRequestError(
        f"{type(model).__name__} reads token_type_ids, these change its output, and drafted tokens have none: ask the tokenizer "
        "for none (return_token_type_ids=False)"
    )


def _turns(input_ids: Tensor, config: GenerationConfig, past: Cache | None, mask: Tensor | None) -> EarlierTurns | None:
    """Return the cache that the sequence continues, or that is to be filled; None without one.

    An empty cache that cannot be filled stays empty.
    """
    if past is None:
        return None
    if not isinstance(past, Cache):
        raise UnsupportedRequestError(
            f"the decoder cannot continue this past_key_values: it is a {type(past).__name__}: pass a DynamicCache"
        )
    if past.get_seq_length() > 0:
        _check_continuation(past, input_ids, config, mask)
        return EarlierTurns(past)
    is_kept = config.return_dict_in_generate or getattr(past, "_is_user_defined", False)
    fits = input_ids.shape[0] == 1 and not is_padded(mask) and unreadable_reason(past) is None
    return EarlierTurns(past) if is_kept and fits else None


def is_padded(mask: Tensor | None) -> bool:
    return mask is not None and not bool(mask.all())


def _check_continuation(past: Cache, input_ids: Tensor, config: GenerationConfig, mask: Tensor | None) -> None:
    """Raise `UnsupportedRequestError` unless `input_ids` [1, length] are all tokens of the conversation, without padding."""
    (num_rows, length), known = input_ids.shape, past.get_seq_length()
    # `generate` drops a mask of ones, and keeps its length.
    mask_length = getattr(config, "_mask_length", length) if mask is None else mask.shape[1]
    reason = unreadable_reason(past)
    if num_rows > 1:
        reason = f"it continues a single prompt, got a batch of {num_rows}"
    elif mask_length != length:
        reason = f"drafts copy from the text: pass the token ids of all turns, got {length} of {mask_length}"
    elif is_padded(mask):
        reason = "it takes no padding"
    elif length <= known:
        reason = f"it holds {known} positions, and input_ids has only {length} tokens: pass those of all turns and the new one"
    if reason is not None:
        raise UnsupportedRequestError(f"the decoder cannot continue this past_key_values: {reason}")


def _refuse_stateful(processors: Sequence[Callable[..., Tensor]]) -> None:
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise UnsupportedRequestError(
                f"the decoder also calls logits processors on drafts that may be rejected: {type(processor).__name__} "
                "remembers its calls and cannot be used"
            )


def _without_padding(padded: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return padded.tolist()
    if not mask[-1]:
        raise UnsupportedRequestError(
            "the decoder continues the last token of the prompt, but attention_mask hides it: pad on the left"
        )
    return padded[mask.bool()].tolist()


def _as_in_batch(input_ids: Tensor, row: int, num_prompt: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper that shows a processor or criterion one row's sequence as `generate` would.

    Padding is included, because some count positions. The row is repeated to the batch size, because some hold one
    number per row.
    """
    num_rows, length = input_ids.shape
    if num_rows == 1 and num_prompt == length:
        return lambda ask: ask

    def widened(values: Any) -> Any:
        return values.repeat(num_rows, 1) if isinstance(values, Tensor) else values

    def seen(ask: Callable[..., Any]) -> Callable[..., Any]:
        def shown(ids: Tensor, *rest: Any) -> Any:
            padded = torch.cat([input_ids[row : row + 1].to(ids.device), ids[:, num_prompt:]], dim=1)
            answer = ask(widened(padded), *map(widened, rest))
            return answer[row : row + 1] if isinstance(answer, Tensor) and answer.ndim else answer

        return shown

    return seen


def _ending(
    input_length: int,
    config: GenerationConfig,
    criteria: Sequence[Any],
    seen: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Ending:
    """Convert the stopping criteria into an `Ending`.

    The stock length and end-of-sequence criteria become numbers, because calling them for every token would be slow.
    The others are kept as they are.
    """
    lengths = [config.max_length] if config.max_length is not None else []
    eos: set[int] = set()
    others = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        else:
            others.append(seen(criterion))
    if not lengths:
        raise UnsupportedRequestError("no length limit: pass max_new_tokens or max_length")
    return Ending(min(lengths) - input_length, frozenset(eos), tuple(others))


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
    given = [arguments.pop("stop_strings", None), None if config is None else config.stop_strings, own]
    strings = next((each for each in given if each is not None), None)
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
