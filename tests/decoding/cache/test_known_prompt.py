"""A prompt that is known: no later decoding reads it, none has another text for it, and heads read it all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from decoding.acceptance import Sampling
from decoding.cache.earlier_turns import EarlierTurns
from decoding.cache.known_prompt import KnownPrompt
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import Draft, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.head_folder import HeadFolder
from decoding.target import Target
from decoding.target.states import cache_after, exit_states
from decoding.text import Ending
from tests.support.families import SUPPORTED, some_tokens, static_target_of, target_of
from tests.support.heads import write_heads
from tests.support.tiny import tiny_target

PROMPT = [token % 60 for token in some_tokens(20)]
ENDING = Ending(12)
DRAFTS: tuple[Draft, ...] = (
    PlainDecoding(),
    LayerSkip.blocks((1,)),
    PromptLookup(),
    LayerSkip.blocks((2,)).having(lookup=Lookup()),
)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the widths of passes of the whole model, as they are run: prompts, and short ones that check drafts."""
    widths, forward = list[int](), Target.forward

    def counted(target: Target, token_ids: Tensor, *args: object, **kwargs: object) -> Tensor:
        widths.append(token_ids.shape[1])
        return forward(target, token_ids, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward", counted)
    return widths


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_known_prompt_is_read_once_and_its_text_does_not_change(family: str, read: list[int]) -> None:
    target = target_of(family)
    expected = plain_decoder(target).generate(Request(PROMPT, ENDING)).tokens
    read.clear()
    known = KnownPrompt()
    for draft in DRAFTS:
        generation = Decoder(target, draft, Fixed(max_tokens=3)).generate(Request(PROMPT, ENDING, known=known))
        assert generation.tokens == expected
        assert generation.prefill.seconds >= known.seconds > 0
    assert read.count(len(PROMPT)) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_prompts_of_a_batch_in_fixed_memory_are_known_too(family: str, read: list[int]) -> None:
    target, prompts = static_target_of(family), [PROMPT, some_tokens(9, seed=1)]
    plain = plain_decoder(target)
    expected = [plain.generate(Request(prompt, ENDING)).tokens for prompt in prompts]
    known = [KnownPrompt() for _ in prompts]
    requests = [Request(prompt, ENDING, known=each) for prompt, each in zip(prompts, known, strict=True)]
    read.clear()
    for draft in DRAFTS:
        written = Decoder(target, draft, Fixed(max_tokens=3)).generate_batch(requests)
        assert [each.tokens for each in written.generations] == expected
    assert [read.count(len(prompt)) for prompt in prompts] == [1, 1]


def test_a_sampled_text_is_the_same_after_a_known_prompt() -> None:
    plain, known = plain_decoder(tiny_target()), KnownPrompt()

    def text(known: KnownPrompt | None) -> tuple[int, ...]:
        acceptance = Sampling(torch.Generator().manual_seed(3))
        return plain.generate(Request(PROMPT, ENDING, acceptance, known=known)).tokens

    assert text(known) == text(known) == text(None)


def test_a_head_reads_a_known_prompt_all_the_same(tmp_path: Path, read: list[int]) -> None:
    target, known = tiny_target(), KnownPrompt()
    expected = plain_decoder(target).generate(Request(PROMPT, ENDING, known=known)).tokens
    decoder = Decoder(
        target, write_heads(target, tmp_path, [2])[2], Fixed(max_tokens=3), heads=HeadFolder(target, tmp_path)
    )
    seconds = known.seconds
    assert decoder.generate(Request(PROMPT, ENDING, known=known)).tokens == expected
    assert known.seconds == seconds


def test_states_after_a_known_prompt_are_those_of_the_whole_sequence() -> None:
    target, known = tiny_target(), KnownPrompt()
    written = plain_decoder(target).generate(Request(PROMPT, ENDING, known=known)).tokens
    token_ids, first = torch.tensor([[*PROMPT, *written[:-1]]]), len(PROMPT)
    whole, logits = exit_states(target, token_ids, {2: first, 4: first + 3}, first=first)
    states, own = exit_states(target, token_ids, {2: first, 4: first + 3}, first=first, known=known)
    torch.testing.assert_close(own, logits)
    torch.testing.assert_close(states, whole)
    with_prompt, _ = exit_states(target, token_ids, {2: 0}, first=first, known=known)
    assert with_prompt[2].shape[1] == token_ids.shape[1]
    assert cache_after(target, token_ids, 1, known).length == token_ids.shape[1]


def test_a_prompt_is_known_or_continues_earlier_turns() -> None:
    with pytest.raises(ValueError, match="not both"):
        Request(PROMPT, ENDING, turns=EarlierTurns(DynamicCache()), known=KnownPrompt())
