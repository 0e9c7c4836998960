"""Properties of acceptance, rolling back, batches and documents, by hypothesis. Few examples; the fixed seed makes runs repeat."""

from __future__ import annotations

import functools
import string
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from decoding.acceptance import accept_greedy, accept_sampled
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.errors import ProfileError
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from tests.support.tiny import tiny_target

FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None)
MANY = settings(max_examples=60, deadline=None, derandomize=True, database=None)
TOKENS = some.integers(1, 7)


@functools.cache
def target() -> Target:
    return tiny_target(4)


@MANY
@given(some.lists(some.tuples(TOKENS, TOKENS), max_size=8), TOKENS)
def test_greedy_acceptance_is_the_longest_common_beginning(pairs: list[tuple[int, int]], last: int) -> None:
    drafted, choices = [pair[0] for pair in pairs], [*(pair[1] for pair in pairs), last]
    verdict = accept_greedy(torch.tensor(drafted, dtype=torch.long), torch.tensor(choices)).tolist()
    right = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert verdict[:2] == [right, choices[right]]


@MANY
@given(some.integers(0, 2**31), some.integers(1, 4))
def test_sampled_acceptance_never_emits_what_the_target_excludes(seed: int, num_drafts: int) -> None:
    stream = torch.Generator().manual_seed(seed)
    draft = torch.rand((num_drafts, 6), generator=stream).softmax(-1)
    scores = torch.rand((num_drafts + 1, 6), generator=stream)
    scores[:, seed % 6] = -torch.inf
    drafted = torch.multinomial(draft, 1, generator=stream)[:, 0]
    num_accepted, token, *_ = accept_sampled(drafted, draft, scores.softmax(-1), stream).tolist()
    assert 0 <= num_accepted <= num_drafts
    assert seed % 6 not in [*drafted[:num_accepted].tolist(), token]


@FEW
@given(some.lists(some.integers(1, 63), min_size=3, max_size=12), some.integers(1, 10), some.integers(1, 4))
def test_positions_after_a_rollback_are_as_if_never_written(tokens: list[int], kept: int, width: int) -> None:
    kept = min(kept, len(tokens) - 1)
    ids, cache = torch.tensor([tokens]), target().new_cache(len(tokens) + width)
    target().forward(ids, cache, 0)
    cache.length = len(tokens)
    cache.roll_back(kept)
    with torch.inference_mode():
        again = target().forward(ids[:, kept:], cache, kept)
        whole = target().forward(ids, target().new_cache(len(tokens)), 0)[kept:]
    assert torch.allclose(again, whole, atol=1e-4)


@FEW
@given(
    some.lists(some.lists(some.integers(1, 63), min_size=1, max_size=9), min_size=2, max_size=3),
    some.integers(1, 5),
    some.sets(some.integers(0, 3), min_size=1, max_size=2),
)
def test_each_sequence_of_a_batch_is_the_one_decoded_alone(
    prompts: list[list[int]], most: int, skipped: set[int]
) -> None:
    decoder = Decoder(target(), LayerSkip.blocks(sorted(skipped)), Fixed(max_tokens=most))
    requests = [Request(prompt, Ending(6)) for prompt in prompts]
    alone = [plain_decoder(target()).generate(request).tokens for request in requests]
    assert [each.tokens for each in decoder.generate_batch(requests).generations] == alone


@MANY
@given(some.text(some.sampled_from(string.ascii_letters + ":[]{}&*!|>-#'\"\n "), max_size=80))
def test_any_text_is_refused_in_one_line(text: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        path.write_text(f"schema: sdtune/v1\n{text}", encoding="utf-8")
        with pytest.raises(ProfileError) as refusal:  # no text of this length holds all keys
            DraftProfile.load(path)
    assert len(str(refusal.value).splitlines()) == 1
