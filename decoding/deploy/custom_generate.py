"""Profiles in transformers: `decoder.generate(model, **inputs)`, or `model.generate(**inputs, custom_generate=decoder)`.

In both, transformers' `generate` prepares the logits processors and stopping criteria and calls the decoder with them. The first
also takes a `streamer` and `stop_strings`, which transformers does not hand to a custom decoder. `on_tokens=callback` streams token
ids in both. `history=store` lets a draft by suffix automaton copy from earlier answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationConfig

from decoding.acceptance import Greedy, Sampling
from decoding.decoder import Decoder, plain_decoder
from decoding.deploy.mismatch import (
    MISMATCHES,
    OnMismatch,
    check_choice,
    check_depth,
    check_target,
    compiled_model,
    fits,
    unmeasured_setting,
)
from decoding.deploy.registry import fetch_profile, is_address
from decoding.deploy.requests import (
    OnTokens,
    is_padded,
    refuse_token_types,
    requests_of,
    streaming_to,
    with_stop_strings,
)
from decoding.drafts.history import RequestHistory
from decoding.errors import (
    ExitHeadError,
    ProfileWarning,
    TargetMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
    UnsupportedRunnerError,
    one_line,
)
from decoding.exit_heads import check_head_file
from decoding.head_folder import HeadFolder
from decoding.profile import DraftProfile
from decoding.rounds import BatchGeneration, Generation, Prefill, Round
from decoding.target import Target
from decoding.text import Request
from decoding.timing.round_costs import with_measured_costs


def load_decoder(
    profile: str | Path | DraftProfile,
    *,
    on_mismatch: OnMismatch = "error",
    folder: str | Path | None = None,
    tracking_uri: str | None = None,
) -> ProfileDecoder:
    """Return a decoder for `decoder.generate(model, ...)` or `model.generate(..., custom_generate=decoder)`.

    `profile` is a path, a loaded profile, or an address such as `models:/NAME@champion` of one that is registered in the MLflow
    server or store `tracking_uri` (see `decoding.deploy.registry.fetch_profile`). Files of the draft are read from `folder`, by
    default the folder of the profile; a registered profile is downloaded into it.

    The model is checked against the profile's fingerprint at its first use. A profile that does not fit raises
    `TargetMismatchError`, `ExitHeadError` (a head that is missing, altered or of another model), `UnsupportedRunnerError` or
    `UnsupportedModelError`, unless `on_mismatch` says otherwise: see `decoding.deploy.mismatch.OnMismatch`. Raises `ProfileError`
    for an unreadable profile, always.
    """
    if is_address(profile):
        profile, folder = fetch_profile(str(profile), tracking_uri=tracking_uri, folder=folder), None
    if not isinstance(profile, DraftProfile):
        folder = folder or Path(profile).parent
        profile = DraftProfile.load(profile)
    return ProfileDecoder(profile, on_mismatch=on_mismatch, folder=folder)


class ProfileDecoder:
    """Decodes for `generate` as a profile says.

    `last_generation` holds the facts of the latest call with one prompt, `last_batch` of the latest call with several.
    `plain_because` says why the latest model is decoded plainly, or is None if the profile fits. Each warning is given once.

    Threads may share a decoder: the state of a call is its own. The three properties then belong to whichever call was the latest.
    """

    def __init__(
        self, profile: DraftProfile, *, on_mismatch: OnMismatch = "error", folder: str | Path | None = None
    ) -> None:
        check_choice(on_mismatch)
        self.profile = profile
        self.on_mismatch = on_mismatch
        self.plain_because: str | None = None
        self._folder = folder
        self._warned: set[str] = set()
        self.last_generation: Generation | None = None
        self.last_batch: BatchGeneration | None = None
        self._decoder: Decoder | None = None
        self._building = Lock()
        # With `plain`, a wrong file is found at the first use, as any other mismatch is.
        self._heads_folder = None if on_mismatch == "plain" else _checked_heads_folder(profile, folder)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.profile.name}: {self.profile.draft.describe()}>"

    def generate(
        self,
        model: PreTrainedModel,
        inputs: Tensor | None = None,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_tokens: OnTokens | None = None,
        **arguments: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Return what `model.generate(inputs, **arguments)` returns, decoded as the profile says.

        `streamer` gets the prompt, each token as soon as its round is accepted, and the end, also if decoding fails.
        `stop_strings` among the arguments need the `tokenizer`. Raises as `__call__` does.
        """
        try:
            arguments = with_stop_strings(model, tokenizer, arguments)
            if streamer is not None:
                # `generate` puts the prompt; the tokens reach the streamer by the callback.
                arguments["streamer"], on_tokens = streamer, streaming_to(streamer, on_tokens)
            return model.generate(inputs, custom_generate=self, on_tokens=on_tokens, **arguments)
        finally:
            if streamer is not None:
                streamer.end()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Sequence[Callable[..., Tensor]] = (),
        stopping_criteria: Sequence[Callable[..., Any]] = (),
        generation_config: GenerationConfig | None = None,
        on_tokens: OnTokens | None = None,
        history: RequestHistory | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Return token ids [prompts, prompt + generated], padded on the right, or the output object if asked for.

        Called by `generate`. Several prompts are decoded in lockstep, each as if it were alone (`decoding.lockstep`); `on_tokens`
        takes a single prompt. With a `history`, drafts may be copied from the answers in it, and the new answers are added to it.
        A `DynamicCache` of earlier turns as `past_key_values` is continued and extended in place; `input_ids` are then all turns.

        Raises `UnsupportedRequestError` for beams, a cache that cannot be continued, inputs other than token ids, a logits
        processor with state, padding that the model counts as positions, or a history that the profile's draft does not read.
        """
        config = generation_config or model.generation_config
        self._check_history(history)
        if model.training:
            raise UnsupportedRequestError(
                "the model is in training mode, in which its output is random: call model.eval()"
            )
        refuse_token_types(model, input_ids, kwargs.get("token_type_ids"))
        given = requests_of(input_ids, config, logits_processor, stopping_criteria, kwargs)
        if is_padded(kwargs.get("attention_mask")):
            self.decoder_for(model).target.checks.padding()
        requests = [replace(request, history=history) for request in given]
        if len(requests) > 1:
            if on_tokens is not None:
                raise UnsupportedRequestError(
                    f"a streamer or on_tokens streams a single prompt, got a batch of {len(requests)}"
                )
            batch = self.decoder_for(model).generate_batch(requests)
            self.last_generation, self.last_batch = None, batch
            texts = [generation.tokens for generation in batch.generations]
        else:
            generation = self._stream(model, requests[0], on_tokens)
            self.last_generation, self.last_batch = generation, None
            texts = [generation.tokens]
        if history is not None:
            for text in texts:
                history.add(text)
        generated = _as_rectangle(texts, config).to(dtype=input_ids.dtype, device=input_ids.device)
        sequences = torch.cat([input_ids, generated], dim=1)
        if not config.return_dict_in_generate:
            return sequences
        turns = requests[0].turns
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=None if turns is None else turns.past)

    def _check_history(self, history: RequestHistory | None) -> None:
        if history is not None and not self.profile.draft.reads_history:
            raise UnsupportedRequestError(
                f"profile {self.profile.name!r} drafts by {self.profile.draft.describe()}, which reads no earlier answers: "
                "only a suffix automaton takes a history"
            )

    def _stream(self, model: PreTrainedModel, request: Request, on_tokens: OnTokens | None) -> Generation:
        steps: list[Prefill | Round] = []
        for step in self.decoder_for(model).steps(request):
            steps.append(step)
            if on_tokens is not None:
                on_tokens((step.token,) if isinstance(step, Prefill) else step.tokens)
        return Generation.collect(steps)

    def prepare(self, model: PreTrainedModel, *, shortest: int, longest: int, num_prompts: int = 1) -> None:
        """Prepare `model` for sequences of these lengths, so that none of the first ones is slower than later ones.

        Optional: without it, everything is prepared when it is first needed. `shortest` is the length of the shortest
        prompt, `longest` the length of the longest sequence, prompt and new tokens, both in tokens; `num_prompts` are the prompts
        of one call. Raises as `decoder_for` does, and ValueError for impossible lengths.
        """
        decoder = self.decoder_for(model)
        sampling = Sampling(torch.Generator(decoder.target.device))  # of its own: the caller's random numbers stay
        decoder.prepare(shortest, longest, num_prompts, acceptances=(Greedy(), sampling))

    def decoder_for(self, model: PreTrainedModel) -> Decoder:
        """Return the decoder of `model`, checked and built at its first use and when the model has changed since."""
        with self._building:
            if self._decoder is None or not self._still_fits(model, self._decoder.target):
                self._decoder = None  # also if the model does not fit any more
                self._decoder = self._fitting(model)
                if self.plain_because is None and (remark := unmeasured_setting(self.profile, model)) is not None:
                    self._warn(remark)
                if (remark := compiled_model(model)) is not None:
                    self._warn(remark)
            return self._decoder

    def _still_fits(self, model: PreTrainedModel, target: Target) -> bool:
        """Return whether `target` is of `model` as it is now, and its weights fit the profile as well as they did.

        A new decoder is needed after an adapter or another LM head was put into the model, as parts of it would run the old one,
        and in another precision or on another device. Weights that have only moved are followed.
        """
        if target.model is not model:
            return False
        try:
            if not target.follow_weights() or self.on_mismatch == "warn":
                return True
        except UnsupportedModelError:
            return False
        return self.plain_because is None and fits(self.profile, model)

    def _fitting(self, model: PreTrainedModel) -> Decoder:
        """Return the decoder of the profile, or a plain one if that is what a mismatch asks for."""
        self.plain_because = None
        try:
            self._check(model)
            return self._decoder_of(self._target_of(model))
        except MISMATCHES as mismatch:
            if self.on_mismatch != "plain":
                raise
            self.plain_because = one_line(mismatch)
        self._warn(f"decoding plainly, without profile {self.profile.name!r}: {self.plain_because}")
        return plain_decoder(Target(model))

    def _check(self, model: PreTrainedModel) -> None:
        try:
            check_target(self.profile, model)
        except TargetMismatchError as mismatch:
            if self.on_mismatch != "warn":
                raise
            check_depth(self.profile, model, mismatch)
            self._warn(str(mismatch))

    def _target_of(self, model: PreTrainedModel) -> Target:
        """Return the model with the profile's runner; if it cannot run the model, warn and use the default one.

        Bit-exact mode has no substitute: `UnsupportedRunnerError` is raised.
        """
        decoding = self.profile.decoding
        try:
            return Target(model, decoding.runner, exact_width=decoding.exact_width)
        except UnsupportedRunnerError as cause:
            if decoding.exact_width is not None:
                raise
            self._warn(
                f"{cause}; using the default runner, which may be slower than profile {self.profile.name!r} reports"
            )
            return Target(model)

    def _decoder_of(self, target: Target) -> Decoder:
        draft, decoding = self.profile.draft, self.profile.decoding
        folder = self._heads_folder or _checked_heads_folder(self.profile, self._folder)
        heads = HeadFolder(target, folder) if folder else None
        rule = with_measured_costs(target, draft, self.profile.draft_length, decoding, heads=heads)
        return Decoder(target, draft, rule, decoding, heads=heads)

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, ProfileWarning, stacklevel=4)


def _checked_heads_folder(profile: DraftProfile, folder: str | Path | None) -> Path | None:
    """Return the folder with the draft's files, checked by their hashes; None if the draft has no files."""
    files = profile.draft.files
    if not files:
        return None
    if folder is None:
        raise ExitHeadError(f"profile {profile.name!r} needs {', '.join(files)}: give folder= where it lies")
    for name, sha256 in files.items():
        check_head_file(Path(folder) / name, sha256)
    return Path(folder)


def _as_rectangle(texts: Sequence[Sequence[int]], config: GenerationConfig) -> Tensor:
    """Return token ids [sequences, longest], padded on the right."""
    longest = max(len(text) for text in texts)
    padding = config.pad_token_id
    if padding is None and any(len(text) < longest for text in texts):
        raise UnsupportedRequestError(
            "sequences of the batch have different lengths and there is no padding token: set pad_token_id"
        )
    return torch.tensor([[*text, *[padding] * (longest - len(text))] for text in texts])
