"""The way into transformers: `model.generate(**inputs, custom_generate=load_decoder("profile.yaml"))`.

`generate` prepares the logits processors and stopping criteria and calls the decoder with them. Streaming callers pass
`on_tokens=callback` to `generate`: transformers keeps a `streamer` to itself when a decoder of another's is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    MaxLengthCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from decoding.acceptance import Greedy, Sampling
from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.errors import ExitHeadError, TargetMismatchError, UnsupportedRequestError, UnsupportedRunnerError
from decoding.exit_head import ExitHeads, check_head_file
from decoding.fingerprint import fingerprint
from decoding.profile import DraftProfile, EarlyExit
from decoding.rounds import Generation, Prefill, Round
from decoding.target import Target
from decoding.text import Ending, Shaping

OnTokens = Callable[[tuple[int, ...]], None]

# What `generate` prepares for its own loops and ours makes for itself.
PREPARED_KWARGS = frozenset({"past_key_values", "position_ids", "logits_to_keep", "use_cache", "token_type_ids"})

# They count their calls or keep a cache of their own, and would take drafts for text.
STATEFUL_PROCESSORS = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


def load_decoder(
    profile: str | Path | DraftProfile, *, strict: bool = True, folder: str | Path | None = None
) -> ProfileDecoder:
    """A callable for `model.generate(..., custom_generate=...)` that decodes as the profile says.

    An exit head is looked for in `folder`, by default that of the profile's file. The model is checked against the profile's
    fingerprint when it is first used: another one raises `TargetMismatchError`, or only warns if not `strict`; the head of
    another model is refused in any case. Raises `ProfileError` for a profile that cannot be read, and `ExitHeadError` for a head
    that is missing or not the one the profile was tuned with.
    """
    if not isinstance(profile, DraftProfile):
        folder = folder or Path(profile).parent
        profile = DraftProfile.load(profile)
    return ProfileDecoder(profile, strict=strict, folder=folder)


class ProfileDecoder:
    """Decodes for `generate` as a profile says; `last_generation` holds the facts of the latest call."""

    def __init__(self, profile: DraftProfile, *, strict: bool = True, folder: str | Path | None = None) -> None:
        self.profile = profile
        self.strict = strict
        self._heads_folder = _checked_heads_folder(profile, folder)
        self.last_generation: Generation | None = None
        self._decoder: Decoder | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Callable[..., Tensor]] = (),
        stopping_criteria: Sequence[Callable[..., Any]] = (),
        generation_config: GenerationConfig | None = None,
        on_tokens: OnTokens | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate`. Returns token ids [1, prompt + generated], or the output object if it was asked for.

        Raises `UnsupportedRequestError` for several prompts at once, beams, a filled cache, inputs other than token ids, or a
        logits processor that remembers its calls.
        """
        config = generation_config or model.generation_config
        _refuse_unsupported(input_ids, config, kwargs)
        _refuse_stateful(logits_processor)
        prompt = _without_padding(input_ids, kwargs.get("attention_mask"))
        seen = _as_padded(input_ids, len(prompt))
        request = Request(
            prompt=prompt,
            ending=_ending(input_ids.shape[1], config, stopping_criteria, seen),
            acceptance=Sampling() if config.do_sample else Greedy(),
            shaping=Shaping(tuple(seen(process) for process in logits_processor)),
        )
        steps: list[Prefill | Round] = []
        for step in self.decoder_for(model).steps(request):
            steps.append(step)
            if on_tokens is not None:
                on_tokens((step.token,) if isinstance(step, Prefill) else step.tokens)
        self.last_generation = Generation.collect(steps)
        generated = torch.tensor([self.last_generation.tokens], dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat([input_ids, generated], dim=1)
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

    def decoder_for(self, model: PreTrainedModel) -> Decoder:
        """The profile applied to `model`; checked and built once, and again if another model comes."""
        if self._decoder is None or self._decoder.target.model is not model:
            check_target(self.profile, model, strict=self.strict)
            profile, target = self.profile, _target_of(self.profile, model)
            self._decoder = Decoder(
                target,
                profile.draft,
                profile.draft_length,
                prefix_reuse=profile.decoding.prefix_reuse,
                heads=ExitHeads(target, self._heads_folder) if self._heads_folder else None,
            )
        return self._decoder


def check_target(profile: DraftProfile, model: PreTrainedModel, *, strict: bool = True) -> None:
    """Raise `TargetMismatchError` (or warn, if not `strict`) unless `model` is the one the profile was tuned for."""
    expected, found = profile.target, fingerprint(model)
    if found.config_sha256 != expected.config_sha256:
        what = "another configuration"
    elif found.weights_sha256 != expected.weights_sha256:
        what = "other weights"
    else:
        return
    message = (
        f"profile {profile.name!r} was tuned for {expected.model} ({expected.architecture}, {expected.num_layers} layers), but the "
        f"model given, {model.config.name_or_path or type(model).__name__}, has {what}: load the model it was tuned for, or tune "
        "this one with `sdtune search`"
    )
    if strict:
        raise TargetMismatchError(message)
    if (layers := model.config.get_text_config().num_hidden_layers) != expected.num_layers:
        raise TargetMismatchError(f"{message} (its {layers} layers cannot take this draft, strict or not)")
    warnings.warn(message, stacklevel=3)


def _target_of(profile: DraftProfile, model: PreTrainedModel) -> Target:
    """The model by the profile's runner, or, with a warning, by the one that runs any; a bit-exact mode is not given up."""
    try:
        return Target(model, profile.decoding.runner, exact_width=profile.decoding.exact_width)
    except UnsupportedRunnerError as cause:
        if profile.decoding.exact_width is not None:
            raise
        warnings.warn(
            f"{cause}; it is run as it is, and may be slower than profile {profile.name!r} says", stacklevel=4
        )
        return Target(model)


def _checked_heads_folder(profile: DraftProfile, folder: str | Path | None) -> Path | None:
    """The folder of the profile's exit head, where it lies unharmed; None if the profile needs none."""
    draft = profile.draft
    if not isinstance(draft, EarlyExit) or draft.head is None or draft.head_sha256 is None:
        return None
    if folder is None:
        raise ExitHeadError(f"where is the exit head {draft.head} of profile {profile.name!r}? give folder=")
    check_head_file(Path(folder) / draft.head, draft.head_sha256)
    return Path(folder)


def _refuse_unsupported(input_ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
    for name, wanted in (("num_beams", 1), ("num_return_sequences", 1)):
        if (value := getattr(config, name, None)) not in (None, wanted):
            raise UnsupportedRequestError(f"the decoder needs {name}={wanted}, got {value}")
    if input_ids.shape[0] != 1:  # beams and several sequences widen the batch too: they are named first
        raise UnsupportedRequestError(
            f"the decoder writes one text at a time, got {input_ids.shape[0]} prompts in a batch"
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise UnsupportedRequestError(f"the decoder does not collect scores or states: {name} must be off")
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise UnsupportedRequestError(
            "the decoder keeps its own cache and cannot continue from a filled past_key_values"
        )
    foreign = [
        key for key, value in kwargs.items() if value is not None and key not in {*PREPARED_KWARGS, "attention_mask"}
    ]
    if foreign:
        raise UnsupportedRequestError(
            f"the decoder continues token ids alone, it cannot use {', '.join(sorted(foreign))}"
        )


def _refuse_stateful(processors: Sequence[Callable[..., Tensor]]) -> None:
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise UnsupportedRequestError(
                f"the decoder also asks logits processors about drafts that may be rejected: {type(processor).__name__} "
                "remembers its calls and cannot be used"
            )


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    if attention_mask is None:
        return input_ids[0].tolist()
    if not attention_mask[0, -1]:
        raise UnsupportedRequestError(
            "the decoder continues the last token of the prompt, but attention_mask hides it: pad on the left"
        )
    return input_ids[0][attention_mask[0].bool()].tolist()


def _as_padded(input_ids: Tensor, num_prompt: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Shows a processor or criterion the text as `generate` does: padding included, of which some count the places."""

    def seen(ask: Callable[..., Any]) -> Callable[..., Any]:
        if num_prompt == input_ids.shape[1]:
            return ask
        return lambda ids, *rest: ask(torch.cat([input_ids.to(ids.device), ids[:, num_prompt:]], dim=1), *rest)

    return seen


def _ending(
    input_length: int,
    config: GenerationConfig,
    criteria: Sequence[Any],
    seen: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Ending:
    """The stock length and end-of-text criteria as numbers (they would be asked for every single token), the others as they are."""
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
        raise UnsupportedRequestError("how long may the text become? pass max_new_tokens or max_length")
    return Ending(min(lengths) - input_length, frozenset(eos), tuple(others))
