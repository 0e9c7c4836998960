"""Sequences decoded in lockstep: what they share, how they end, and that none affects another.

`test_lossless` decodes every family and draft in lockstep too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from decoding.acceptance import Sampling
from decoding.cache.kv_cache import KVCache
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import AdaEdl, BetaThompson, Fixed, RoundCosts, TopProbability
from decoding.drafts import Draft, LayerSkip, Lookup, PlainDecoding
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.rounds import Round
from decoding.runners import static
from decoding.runners.buckets import Buckets
from decoding.runners.compilation import compiling
from decoding.runners.contract import Outputs, Part
from decoding.runners.eager import EagerRunner
from decoding.runners.masks import MaskKinds
from decoding.runners.shared_pass import RowInputs, Rows, compute_rows
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending, Shaping
from tests.support.families import VOCABULARY, build, target_of
from tests.support.heads import write_heads
from tests.support.shared_passes import watch_shared_passes
from tests.support.tiny import tiny_target

SIZES = ((5, 13), (11, 8), (3, 16), (8, 1), (1, 6))
"""Lengths of the prompts and of their continuations: the longest has three rounds of the most drafts at least."""
DRAFTS: dict[str, Draft] = {
    "plain": PlainDecoding(),
    "sublayers": LayerSkip(skip_attention=(2, 3), skip_mlp=(1, 3)),
    "lookup, then blocks": LayerSkip(skip_attention=(2, 3), skip_mlp=(2, 3), lookup=Lookup(max_tokens=4)),
}


def _requests(sizes: Sequence[tuple[int, int]] = SIZES, vocabulary: int = VOCABULARY, **options: Any) -> list[Request]:
    stream = torch.Generator().manual_seed(3)
    return [
        Request(torch.randint(vocabulary, (length,), generator=stream).tolist(), Ending(new_tokens), **options)
        for length, new_tokens in sizes
    ]


def _decode_each_alone(decoder: Decoder, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [decoder.generate(request).tokens for request in requests]


def _lockstep(decoder: Decoder, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [generation.tokens for generation in decoder.generate_batch(requests).generations]


@pytest.mark.parametrize("prefix_reuse", [True, False])
def test_an_exit_head_keeps_separate_keys_and_values_per_sequence(tmp_path: Any, prefix_reuse: bool) -> None:
    """It drafts what it drafts alone: it has processed the same positions."""
    target = tiny_target()
    draft = write_heads(target, tmp_path, [2])[2].having(lookup=Lookup(max_tokens=5))
    requests = _requests(vocabulary=64)
    decoding = Decoding(prefix_reuse=prefix_reuse)
    decoder = Decoder(target, draft, AdaEdl(), decoding, heads=HeadFolder(target, tmp_path))
    alone = [decoder.generate(request) for request in requests]
    together = decoder.generate_batch(requests).generations
    assert [each.tokens for each in together] == _decode_each_alone(plain_decoder(target), requests)
    assert [each.num_accepted for each in together] == [each.num_accepted for each in alone]
    assert sum(each.num_accepted for each in alone) > 0


@pytest.mark.parametrize("draft", ["plain", "lookup, then blocks"])
def test_sampled_sequences_depend_on_their_own_random_stream(draft: str) -> None:
    target = target_of("llama")
    decoder = Decoder(target, DRAFTS[draft], Fixed(max_tokens=3))

    def requests() -> list[Request]:
        plain = _requests()
        return [
            Request(each.prompt, each.ending, Sampling(torch.Generator().manual_seed(row)))
            for row, each in enumerate(plain)
        ]

    texts = _decode_each_alone(decoder, requests())
    assert _lockstep(decoder, requests()) == texts
    assert texts != _decode_each_alone(decoder, _requests())


def test_sequences_end_independently() -> None:
    target = target_of("llama")
    requests = _requests()
    text = plain_decoder(target).generate(requests[2]).tokens
    ends = [Request(each.prompt, Ending(25, frozenset(text[4:5]))) for each in requests]
    decoder = Decoder(target, DRAFTS["sublayers"], Fixed(max_tokens=3))
    texts = _lockstep(decoder, ends)
    assert texts == _decode_each_alone(plain_decoder(target), ends)
    assert len({len(each) for each in texts}) > 1


def test_a_pass_covers_the_unfinished_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding of five sequences takes as many passes as the longest one, not the sum of all."""
    target = target_of("llama")
    assert target.unbatchable_reason is None
    passes = _watched(target, monkeypatch)
    batch = plain_decoder(target).generate_batch(_requests())
    assert [len(each) for each in passes] == [4] * 5 + [3] * 2 + [2] * 5 + [1] * 3
    assert batch.num_decoded == sum(new_tokens - 1 for _, new_tokens in SIZES) == sum(len(each) for each in passes)


def test_a_persistent_controller_observes_its_own_sequence_only() -> None:
    target = target_of("llama")
    requests = _requests(((5, 20), (11, 20)))
    rule = BetaThompson(max_tokens=4, persistent=True, costs=RoundCosts(draft_step=0.3, verify=(1.0, 1.05)))
    decoder = Decoder(target, DRAFTS["sublayers"], rule)
    plain = _decode_each_alone(plain_decoder(target), requests)
    for _ in range(3):
        assert _lockstep(decoder, requests) == plain
    first = Decoder(target, DRAFTS["sublayers"], rule)
    for _ in range(3):
        first.generate(requests[0])
    assert decoder.adapted_rule() == first.adapted_rule() != rule


def test_a_batch_that_is_dropped_or_fails_leaves_the_next_as_it_is() -> None:
    after = 5
    target = target_of("llama")
    decoder = Decoder(target, DRAFTS["lookup, then blocks"], Fixed(max_tokens=3))
    requests = _requests()
    expected = _lockstep(decoder, requests)
    begun = decoder.batch_steps(requests)
    for _ in range(after):
        next(begun)
    begun.close()
    assert _lockstep(decoder, requests) == expected

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 6 + after:
            raise RuntimeError("a processor of the user's")
        return scores

    failing = [*requests[:2], Request(requests[2].prompt, requests[2].ending, shaping=Shaping((broken,)))]
    with pytest.raises(RuntimeError, match="a processor of the user's"):
        decoder.generate_batch(failing)
    assert _lockstep(decoder, requests) == expected


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda: Target(build("bloom")), "takes no mask for several sequences"),
        (lambda: Target(build("llama", rope_parameters=DYNAMIC_ROPE)), "rotary embedding"),
        (lambda: Target(build("llama"), "static", exact_width=4), "bit-exact"),
    ],
    ids=["alibi", "rope", "bit-exact"],
)
@pytest.mark.usefixtures("uncompiled")
def test_sequences_that_cannot_share_passes_take_turns(target: Any, words: str) -> None:
    target = target()
    assert words in str(target.unbatchable_reason)
    requests = _requests()
    decoder = Decoder(target, DRAFTS["sublayers"], Fixed(max_tokens=3))
    assert _lockstep(decoder, requests) == _decode_each_alone(plain_decoder(target), requests)
    rows = [row for row, step in decoder.batch_steps(requests) if isinstance(step, Round)]
    assert rows[:4] == [0, 1, 2, 4], "the sequence of a single token has no round"


@pytest.mark.usefixtures("uncompiled")
def test_nothing_is_compiled_for_the_last_remaining_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The static runner keeps at least two rows per pass of a batch, whichever sequence continues."""
    target = Target(build("llama"), "static")
    assert target.unbatchable_reason is None
    shapes: list[tuple[int, int]] = []

    def watched(part: Part, given: RowInputs, cache: KVCache, kinds: Any, rows: Rows) -> Outputs:
        assert rows.first + rows.num_rows <= 3
        shapes.append((int((given.widths > 0).sum()), rows.num_rows))
        return compute_rows(part, given, cache, kinds, rows)

    monkeypatch.setattr("decoding.runners.shared_pass.compute_rows", watched)
    for longest in range(3):
        requests = _requests([(4, 20 if row == longest else 5) for row in range(3)])
        for draft in ("plain", "sublayers"):
            decoder = Decoder(target, DRAFTS[draft], Fixed(max_tokens=3))
            assert _lockstep(decoder, requests) == _decode_each_alone(plain_decoder(target), requests)
    assert (1, 2) in shapes
    assert min(num_rows for _, num_rows in shapes) == 2


PADDED = Buckets((1, 4, 9), slot_step=16, all_rows=True)
"""As on a GPU, where a shared pass covers all rows of the storage, but with few shapes."""


def padded(mask_kinds: MaskKinds, device: torch.device) -> EagerRunner:
    return StaticRunner(mask_kinds, device, compiled=False, buckets=PADDED)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_passes_over_all_rows_equal_plain_decoding(family: str) -> None:
    target = Target(build(family), padded)
    assert target.unbatchable_reason is None
    expected = _decode_each_alone(plain_decoder(target_of(family)), _requests())
    assert _decode_each_alone(plain_decoder(target), _requests()) == expected
    for draft, rule in (("plain", Fixed()), ("lookup, then blocks", TopProbability(max_tokens=5, threshold=0.3))):
        assert _lockstep(Decoder(target, DRAFTS[draft], rule), _requests()) == expected


def test_passes_of_a_batch_have_few_shapes_that_the_next_batch_reuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape is prepared once: on a GPU, recorded."""
    target = Target(build("llama"), padded)
    assert target.unbatchable_reason is None
    prepared: list[Rows] = []
    preparing: list[bool] = []

    @contextmanager
    def watched_preparation(block_call: Any) -> Iterator[None]:
        with compiling(block_call):
            preparing.append(True)
            yield
            preparing.clear()

    def watched_pass(part: Part, inputs: RowInputs, cache: KVCache, mask_kinds: MaskKinds, rows: Rows) -> Outputs:
        if preparing:
            prepared.append(rows)
        return compute_rows(part, inputs, cache, mask_kinds, rows)

    monkeypatch.setattr(static, "compiling", watched_preparation)
    monkeypatch.setattr(static, "compute_rows", watched_pass)
    decoder = Decoder(target, DRAFTS["sublayers"], Fixed(max_tokens=3))
    requests = _requests([(4, 20), (6, 9), (5, 14)])
    expected = _decode_each_alone(plain_decoder(target), requests)
    assert _lockstep(decoder, requests) == expected
    assert {(rows.first, rows.num_rows) for rows in prepared} == {(0, 3)}
    assert {rows.width for rows in prepared} <= set(PADDED.widths)
    assert len(prepared) <= 2 * 3 * len(PADDED.widths)
    prepared.clear()
    for order in ([2, 0, 1], [1, 2, 0]):
        shuffled = [requests[row] for row in order]
        assert _lockstep(decoder, shuffled) == [expected[row] for row in order]
    assert not prepared, "the next batch reuses the storage of the previous one and its recordings"


DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def _watched(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Collect the sequences in each shared pass, from now on."""
    passes: list[tuple[int, ...]] = []
    watch_shared_passes(target, monkeypatch, lambda part, spans: passes.append(tuple(spans)))
    return passes
