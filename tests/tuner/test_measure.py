"""Measuring: paired, interleaved, compared token by token, and without a trace."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from decoding.decoder import Decoder
from decoding.draft_length import AdaEdl, Fixed, TopProbability
from decoding.profile import LayerSkip, PlainDecoding
from studies.contract import Candidate
from studies.measurement import Measurement
from tests.records import candidate
from tests.tiny import tiny_target
from tuner.errors import DatasetError
from tuner.measure import Bench

PROMPTS = [tuple((seed * 11 + place * 5) % 60 + 2 for place in range(6 + seed)) for seed in range(5)]
CANDIDATES = [
    candidate((1, 3), Fixed(max_tokens=3)),
    candidate((2,), TopProbability(threshold=0.3)),
    candidate((1, 2, 4), AdaEdl(initial_threshold=0.2)),
    Candidate(draft=LayerSkip(skip_attention=(0, 2), skip_mlp=(3,)), draft_length=Fixed(max_tokens=2)),
]


def _bench(**options: Any) -> Bench:
    return Bench(tiny_target(), PROMPTS, **{"max_new_tokens": 16, **options})


def _facts(measured: Measurement) -> list[tuple[int, ...]]:
    return [(s.prompt, s.draft_tokens, s.rounds, s.drafted, s.accepted, s.identical) for s in measured.samples]


def test_every_candidate_writes_the_text_of_plain_decoding() -> None:
    bench = _bench()
    for wanted in CANDIDATES:
        measured = bench.measure(wanted, range(5))
        assert measured.num_identical == 5
        assert all(
            s.plain_tokens == s.draft_tokens == 15 for s in measured.samples
        )  # the prefill's token is not decoded
        assert all(s.plain_seconds > 0 and s.draft_seconds > 0 for s in measured.samples)


def test_the_order_of_trials_does_not_matter() -> None:
    forwards = _bench()
    first = [_facts(forwards.measure(wanted, range(5))) for wanted in CANDIDATES]
    backwards = _bench()
    second = [_facts(backwards.measure(wanted, range(5))) for wanted in reversed(CANDIDATES)]
    assert first == second[::-1]


def test_a_trial_leaves_no_trace_on_the_model() -> None:
    bench = _bench()
    model = bench.target.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    for wanted in CANDIDATES:
        bench.measure(wanted, range(2))
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_plain_decoding_and_the_candidate_take_turns_in_going_first(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench()
    order: list[tuple[int, bool]] = []
    timed = Bench._timed

    def spy(self: Bench, decoder: Decoder, place: int) -> Any:
        order.append((place, decoder is self._plain))
        return timed(self, decoder, place)

    monkeypatch.setattr(Bench, "_timed", spy)
    bench.measure(CANDIDATES[0], range(3))
    assert order == [(0, True), (0, False), (1, False), (1, True), (2, True), (2, False)]


def test_every_sample_is_shown_as_it_comes_and_may_stop_the_measurement() -> None:
    seen = []

    def stop(sample: Any) -> None:
        seen.append(sample.prompt)
        if len(seen) == 2:
            raise RuntimeError("enough")

    was_enabled = gc.isenabled()
    with pytest.raises(RuntimeError, match="enough"):
        _bench().measure(CANDIDATES[0], range(5), on_sample=stop)
    assert seen == [0, 1]
    assert gc.isenabled() == was_enabled


def test_a_sampled_run_is_reproducible_and_checked_by_a_greedy_one() -> None:
    first, second = (_bench(temperature=0.7).measure(CANDIDATES[1], range(3)) for _ in range(2))
    assert _facts(first) == _facts(second)
    assert first.num_identical == 3


def test_plain_decoding_can_be_measured_against_itself() -> None:
    measured = _bench().measure(Candidate(draft=PlainDecoding(), draft_length=Fixed()), range(4))
    assert measured.acceptance_rate == 0.0
    assert measured.tokens_per_round == 1.0


def test_prompts_whose_text_ends_at_once_are_left_out() -> None:
    texts = _bench().greedy_texts

    def kept(token: int) -> list[int]:
        return [place for place, text in enumerate(texts) if token not in text[:9]]  # the prefill's token and 8 decoded

    ends_some = next(token for token in sorted({t for text in texts for t in text}) if 2 <= len(kept(token)) < 5)
    bench = _bench(eos_token_ids=frozenset({ends_some}))
    assert set(bench.prompts) <= {PROMPTS[place] for place in range(5)}
    assert {PROMPTS[place] for place in kept(ends_some)} <= set(bench.prompts)
    assert bench.num_too_short == 5 - len(bench.prompts) > 0


def test_prompts_that_all_end_at_once_are_refused() -> None:
    with pytest.raises(DatasetError, match="5 of 5 prompts end within 8 tokens"):
        _bench(eos_token_ids=frozenset(range(64)))
