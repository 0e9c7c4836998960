"""Measuring: paired, interleaved, compared token by token, and without a trace."""

from __future__ import annotations

import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import (
    AdaEdl,
    BetaThompson,
    CostAwareRule,
    Fixed,
    RoundCosts,
    TopProbability,
)
from decoding.drafts import LayerSkip, PlainDecoding, SuffixDraft
from decoding.head_folder import HeadFolder
from decoding.losslessness import Comparison
from decoding.profile import Decoding
from decoding.rounds import BatchGeneration
from decoding.target import Target
from decoding.target.views import ExitView
from decoding.text import Ending
from studies.contract import Candidate
from studies.measurement import BatchTexts, Measurement
from tests.support.benches import LoggingClock, bench_on, per_token
from tests.support.heads import write_heads
from tests.support.records import candidate
from tests.support.tiny import tiny_target
from tuner.errors import DatasetError
from tuner.measuring.baseline import FEWEST_DECODED, Baseline, decode_baseline
from tuner.measuring.contender import PLAIN
from tuner.measuring.paired import LEAST_SECONDS_TO_REFUSE, Bench, FarTooSlowError, OwnDecoding
from tuner.measuring.turns import WARM_UP_TOKENS

PROMPTS = [tuple((seed * 11 + index * 5) % 60 + 2 for index in range(6 + seed)) for seed in range(5)]
CANDIDATES = [
    candidate((1, 3), Fixed(max_tokens=3)),
    candidate((2,), TopProbability(threshold=0.3)),
    candidate((1, 2, 4), AdaEdl(initial_threshold=0.2)),
    Candidate(draft=LayerSkip(skip_attention=(0, 2), skip_mlp=(3,)), draft_length=Fixed(max_tokens=2)),
]


@functools.cache
def _target() -> Target:
    """Return one model for all benches of this file, which leave no trace on it."""
    return tiny_target()


@functools.cache
def _baseline(max_new_tokens: int, eos_token_ids: frozenset[int], batch_size: int) -> Baseline:
    return decode_baseline(_target(), PROMPTS, Ending(max_new_tokens, eos_token_ids), batch_size=batch_size)


def _bench(
    *, max_new_tokens: int = 10, eos_token_ids: frozenset[int] = frozenset(), batch_size: int = 1, **options: Any
) -> Bench:
    """Return a bench of its own on texts that are decoded plainly once."""
    return Bench(_target(), _baseline(max_new_tokens, eos_token_ids, batch_size), **options)


def _facts(measured: Measurement) -> list[tuple[int, ...]]:
    return [(s.prompt, s.draft_tokens, s.rounds, s.drafted, s.accepted, s.identical) for s in measured.samples]


def test_every_candidate_writes_the_text_of_plain_decoding() -> None:
    bench = _bench()
    for wanted in CANDIDATES:
        measured = bench.measure(wanted, range(5))
        assert measured.num_identical == 5
        assert all(
            s.plain_tokens == s.draft_tokens == 9 for s in measured.samples
        )  # the prefill's token is not decoded
        assert all(s.plain_seconds > 0 and s.draft_seconds > 0 for s in measured.samples)


def test_the_order_of_trials_does_not_matter_nor_does_a_rule_that_adapts() -> None:
    bench, candidates = _bench(), [*CANDIDATES, candidate((2,), AdaEdl(persistent=True, initial_threshold=0.2))]
    first = [_facts(bench.measure(wanted, range(2))) for wanted in candidates]
    second = [_facts(bench.measure(wanted, range(2))) for wanted in reversed(candidates)]
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


@pytest.mark.parametrize(("times_slower", "is_refused"), [(15.0, False), (25.0, True)])
def test_a_candidate_that_is_far_too_slow_is_given_up_after_a_few_tokens(
    monkeypatch: pytest.MonkeyPatch, times_slower: float, is_refused: bool
) -> None:
    decode, num_written = Decoder.generate_batch, 0

    def decode_slowly(decoder: Decoder, requests: Sequence[Request]) -> BatchGeneration:
        nonlocal num_written
        batch, drafts = decode(decoder, requests), decoder.drafter is not None
        num_written += batch.num_decoded if drafts else 0
        seconds = LEAST_SECONDS_TO_REFUSE * (times_slower if drafts else 1.0)
        return dataclasses.replace(batch, decode_seconds=seconds * batch.num_decoded)

    monkeypatch.setattr(Decoder, "generate_batch", decode_slowly)
    refusal = pytest.raises(FarTooSlowError, match="more than 20 times") if is_refused else nullcontext()
    with refusal:
        _bench(max_new_tokens=40).measure(CANDIDATES[0], [0])
    assert 0 < num_written <= 2 * WARM_UP_TOKENS


def test_the_exit_heads_own_prefill_is_charged_to_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    draft = write_heads(target, tmp_path, [3])[3]
    clock = ClockOfHeads(ExitView.fill)
    monkeypatch.setattr(ExitView, "fill", clock.fill)
    monkeypatch.setattr(time, "perf_counter", clock.read)
    bench = bench_on(target, PROMPTS, heads=HeadFolder(target, tmp_path))
    measured = bench.measure(Candidate(draft=draft, draft_length=Fixed(max_tokens=2)), range(3))
    assert clock.seconds >= 3 * 5.0, "the head reads each prompt once, before the first token"
    for sample in measured.samples:
        assert sample.prefill is not None
        assert (sample.prefill.plain_seconds, sample.prefill.draft_seconds) == (0.0, 5.0)
        assert (sample.prefill.plain_tokens, sample.prefill.draft_tokens) == (1, 1)


def test_candidates_do_not_read_a_known_prompt_again_and_are_charged_its_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny_target()
    baseline = decode_baseline(target, PROMPTS, Ending(10), most_known_bytes=1)
    assert list(baseline.known) == PROMPTS[:1], "the first one fills the memory"
    baseline = decode_baseline(target, PROMPTS, Ending(10), most_known_bytes=2**20)
    bench, widths, forward = Bench(target, baseline), list[int](), Target.forward

    def counted(target: Target, token_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        widths.append(token_ids.shape[1])
        return forward(target, token_ids, *args, **kwargs)

    bench.decoder(CANDIDATES[0])  # tries the skip set on a short text
    monkeypatch.setattr(Target, "forward", counted)
    measured = bench.measure(CANDIDATES[0], range(5))
    assert not widths
    unknown = Bench(target, dataclasses.replace(baseline, known={}))
    assert _facts(measured) == _facts(unknown.measure(CANDIDATES[0], range(5)))
    assert set(map(len, PROMPTS)) <= set(widths)
    for sample, known in zip(measured.samples, baseline.known.values(), strict=True):
        assert sample.prefill is not None
        assert min(sample.prefill.plain_seconds, sample.prefill.draft_seconds) >= known.seconds > 0


class ClockOfHeads:
    """A clock that advances by five seconds whenever a head reads a prompt."""

    def __init__(self, fill: Callable[..., None]) -> None:
        self.seconds = 0.0
        self._fill = fill

    def read(self) -> float:
        return self.seconds

    @property
    def fill(self) -> Callable[..., None]:
        def filled(view: ExitView, *args: Any) -> None:
            self.seconds += 5.0
            self._fill(view, *args)

        return filled


def test_samples_carry_categories_and_what_each_round_accepted() -> None:
    target, ending = tiny_target(), Ending(10)
    categories = ["qa", "qa", "code", None, "code"]
    of_one = decode_baseline(target, PROMPTS, ending, categories=categories)
    measured = Bench(target, of_one).measure(CANDIDATES[0], range(5))
    assert [s.category for s in measured.samples] == categories
    for sample in measured.samples:
        assert sum(sample.accepted_lengths) == sample.rounds
        assert sum(n * count for n, count in enumerate(sample.accepted_lengths)) == sample.accepted
    of_two = decode_baseline(target, PROMPTS, ending, batch_size=2, categories=categories)
    assert [of_two.category(index) for index in of_two.indices] == ["qa", None]
    assert of_one.reordered([4, 3, 2, 1, 0]).categories == ("code", None, "code", "qa", "qa")
    assert decode_baseline(target, PROMPTS, ending, categories=[None] * 5).categories == ()


def test_plain_decoding_is_not_repeated_where_it_costs_the_same_each_time() -> None:
    clock = LoggingClock(per_token(), is_deterministic=True)
    bench = _bench(clock=clock)
    first, second = (bench.measure(CANDIDATES[0], range(2)) for _ in range(2))
    assert [draft for draft in clock.drafts if draft == PlainDecoding()] == [PlainDecoding()] * 2
    assert first == second
    assert first.num_identical == 2


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
    first, second = (_bench(decoding=Decoding(temperature=0.7)).measure(CANDIDATES[1], range(3)) for _ in range(2))
    assert _facts(first) == _facts(second)
    assert first.num_identical == 3


def test_prompts_whose_text_ends_at_once_are_left_out() -> None:
    texts = _bench().continuations

    def kept(token: int) -> list[int]:
        return [index for index, text in enumerate(texts) if token not in text[:9]]  # the prefill's token and 8 decoded

    ends_some = next(token for token in sorted({t for text in texts for t in text}) if 2 <= len(kept(token)) < 5)
    bench = _bench(eos_token_ids=frozenset({ends_some}))
    assert set(bench.prompts) <= set(PROMPTS)
    assert {PROMPTS[index] for index in kept(ends_some)} <= set(bench.prompts)
    assert bench.baseline.num_too_short == 5 - len(bench.prompts) > 0
    assert tuple(PROMPTS[row] for row in bench.baseline.rows) == bench.prompts


def test_texts_end_at_the_first_of_several_end_tokens_and_count_it() -> None:
    texts = _bench(max_new_tokens=40).continuations
    early = {token for text in texts for token in text[:9]}
    late = sorted({token for text in texts for token in text} - early)
    assert late, "some token comes late in all texts"
    ends = frozenset(late)
    lengths = [next((n + 1 for n, token in enumerate(text) if token in ends), 40) for text in texts]
    assert len(set(lengths)) > 1
    bench = _bench(max_new_tokens=40, eos_token_ids=ends)
    assert [len(text) for text in bench.continuations] == lengths
    for wanted in CANDIDATES:
        measured = bench.measure(wanted, range(5))
        assert measured.num_identical == 5
        assert [s.plain_tokens for s in measured.samples] == [length - 1 for length in lengths]
        assert [s.draft_tokens for s in measured.samples] == [length - 1 for length in lengths]
        assert measured.end_to_end is not None
        assert list(measured.end_to_end.draft.tokens) == lengths


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measured costs are made up; the longest drafts that they were asked for, in order."""
    asked: list[int] = []

    def costs(target: Any, drafter: Any, max_tokens: int, *, num_sequences: int) -> RoundCosts:
        asked.append(max_tokens)
        return RoundCosts(draft_step=0.1 * len(asked), verify=(1.0,) * (max_tokens + 1))

    monkeypatch.setattr("tuner.measuring.paired.measure_round_costs", costs)
    return asked


def test_costs_of_a_draft_are_measured_once_for_all_rules_that_weigh_them(timed: list[int]) -> None:
    bench = _bench()
    for rule in (BetaThompson(max_tokens=6), BetaThompson(max_tokens=3), Fixed()):
        bench.measure(candidate((1, 3), rule), range(2))
    assert timed == [6]
    bench.measure(candidate((1, 3), BetaThompson(max_tokens=9)), range(2))
    bench.measure(candidate((2,), BetaThompson(max_tokens=6)), range(2))
    assert timed == [6, 9, 6], "for longer drafts, and for another draft"
    foreign = RoundCosts(draft_step=7.0, verify=(1.0,) * 9)
    bench.measure(candidate((1,), BetaThompson(costs=foreign)), range(2))
    for wanted in CANDIDATES:
        assert bench.warm_up_rule(wanted, range(3)) == wanted, "other rules are not warmed up"
    assert timed == [6, 9, 6], "nor measured, as little as what a rule brings along"


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("rule", [BetaThompson(max_tokens=4), BetaThompson(max_tokens=4, persistent=True)])
def test_cost_aware_rule_is_warmed_up(timed: list[int], rule: CostAwareRule, batch_size: int) -> None:
    warmed_up = _bench(batch_size=batch_size).warm_up_rule(candidate((1, 3), rule), range(2))
    assert warmed_up.draft == candidate((1, 3)).draft
    adapted = warmed_up.draft_length
    assert isinstance(adapted, CostAwareRule)
    assert adapted.costs == RoundCosts(draft_step=0.1, verify=(1.0,) * 5)
    assert adapted.model_dump(exclude={"costs", "prior"}) == rule.model_dump(exclude={"costs", "prior"})
    assert adapted.model_dump(include={"prior"}) != rule.model_dump(include={"prior"})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_candidates_side_by_side_write_what_they_write_alone(temperature: float) -> None:
    bench = _bench(decoding=Decoding(temperature=temperature))
    together = bench.side_by_side(CANDIDATES[:3], [3, 0, 4, 1])
    alone = [bench.measure(wanted, [3, 0, 4, 1]) for wanted in CANDIDATES[:3]]
    assert [_facts(measured) for measured in together] == [_facts(measured) for measured in alone]
    assert all(measured.num_identical == 4 for measured in together)


def test_side_by_side_times_plain_decoding_once_and_rotates_the_order() -> None:
    clock = LoggingClock(per_token(plain=3.0, drafted=2.0))
    bench = _bench(clock=clock)
    seen: list[int] = []
    pair = [candidate((1,), Fixed(max_tokens=2)), candidate((2,), Fixed(max_tokens=3))]
    first, second = bench.side_by_side(pair, range(3), on_sample=lambda sample: seen.append(sample.prompt))
    plain, one, other = PlainDecoding(), pair[0].draft, pair[1].draft
    assert clock.drafts == [plain, one, other, one, other, plain, other, plain, one]
    assert seen == [0, 0, 1, 1, 2, 2]
    for measured in (first, second):
        assert [(s.plain_seconds, s.draft_seconds) for s in measured.samples] == [(3.0 * 9, 2.0 * 9)] * 3


# --- batches --------------------------------------------------------------------------------------------------------------


def _facts_of_texts(bench: Bench, wanted: Candidate, indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The sums of tokens, rounds, drafted and accepted tokens per index, from a bench that decodes one sequence at a time."""
    alone = _facts(bench.measure(wanted, [row for index in indices for row in (2 * index, 2 * index + 1)]))
    pairs = zip(alone[::2], alone[1::2], strict=True)
    return [tuple(one + other for one, other in zip(first[1:5], second[1:5], strict=True)) for first, second in pairs]


@pytest.mark.parametrize("wanted", CANDIDATES[1:3])
def test_a_batch_is_its_prompts_together(wanted: Candidate) -> None:
    bench = _bench(batch_size=2)
    swapped = bench.reordered([2, 3, 0, 1])
    assert [f[1:] for f in _facts(swapped.measure(wanted, [1, 0]))] == [
        f[1:] for f in _facts(bench.measure(wanted, [0, 1]))
    ]
    assert (list(bench.indices), bench.baseline.num_left_over) == ([0, 1], 1)
    assert bench.prompts == tuple(PROMPTS[:4])
    measured = bench.measure(wanted, bench.indices)
    assert [facts[1:5] for facts in _facts(measured)] == _facts_of_texts(_bench(), wanted, bench.indices)
    assert (measured.num_prompts, measured.num_identical, measured.batch_size) == (4, 4, 2)
    assert all(sample.identical and sample.plain_tokens == 18 for sample in measured.samples)


def test_a_batch_is_decoded_in_lockstep_plainly_too_and_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LoggingClock(per_token(drafted=0.5))
    bench = _bench(batch_size=2, clock=clock)
    sizes: list[int] = []
    steps = Decoder.batch_steps

    def watched(self: Decoder, requests: Sequence[Request]) -> Any:
        sizes.append(len(requests))
        return steps(self, requests)

    monkeypatch.setattr(Decoder, "batch_steps", watched)
    monkeypatch.setattr(Decoder, "steps", lambda *_: pytest.fail("a sequence was decoded by itself"))
    measured = bench.measure(CANDIDATES[0], bench.indices)
    plain, draft = PlainDecoding(), CANDIDATES[0].draft
    assert clock.drafts == [plain, draft, draft, plain]
    assert sizes == [2] * 7, (
        "warm-ups of both and both batches, and a few tokens that show whether the draft is far too slow"
    )
    assert measured.speedup == 2.0
    assert measured.plain_tokens_per_second == 1.0


def test_one_wrong_text_of_a_batch_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench(batch_size=2)
    *others, last = bench.continuations
    wrong_baseline = dataclasses.replace(bench.baseline, continuations=(*others, (*last[:-1], 63)))
    bench = Bench(bench.target, wrong_baseline)
    right, wrong = bench.measure(CANDIDATES[0], bench.indices).samples
    assert right.identical
    assert not wrong.identical
    assert not wrong.tie
    assert wrong.texts == BatchTexts(count=2, identical=1, ties=0)
    monkeypatch.setattr("tuner.measuring.paired.compare", lambda *_: Comparison(identical=False, tie=True))
    measured = bench.measure(CANDIDATES[0], bench.indices)
    assert (measured.is_lossless, measured.num_identical, measured.num_ties) == (True, 0, 4)


def test_without_known_continuations_texts_are_compared_with_plain_decoding_of_the_same_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, written, generate = _bench().baseline, list[int](), Decoder.generate
    eos = frozenset({known.continuations[0][3]})

    def watched(decoder: Decoder, request: Request) -> Any:
        generation = generate(decoder, request)
        written.append(generation.num_decoded)
        return generation

    monkeypatch.setattr(Decoder, "generate", watched)
    baseline = decode_baseline(_target(), PROMPTS, Ending(10), whole=False)
    assert (baseline.prompts, baseline.continuations) == (known.prompts, ())
    assert written == [FEWEST_DECODED] * 5, "as far as tells that they are long enough"
    ending = decode_baseline(_target(), PROMPTS, Ending(20, eos), whole=False)
    assert 0 < ending.num_too_short == _bench(max_new_tokens=20, eos_token_ids=eos).baseline.num_too_short

    bench = Bench(_target(), baseline)
    assert bench.measure(CANDIDATES[0], range(5)).num_identical == 5
    decode = OwnDecoding.decode

    def spoilt(self: OwnDecoding, *args: Any) -> Any:
        found = decode(self, *args)
        texts = tuple((*text[:-1], 63) for text in found.texts)
        return found if self.name == PLAIN else dataclasses.replace(found, texts=texts)

    monkeypatch.setattr(OwnDecoding, "decode", spoilt)
    assert bench.measure(CANDIDATES[0], range(5)).num_identical == 0
    with pytest.raises(ValueError, match="sampled sequences are compared by the baseline's continuations"):
        Bench(_target(), baseline, decoding=Decoding(temperature=1.0))


def test_too_few_prompts_for_two_batches_are_refused_in_one_line() -> None:
    with pytest.raises(
        DatasetError,
        match=r"0 of 5 prompts end within 8 tokens .* and 6 longer ones make two batches of 3: give prompts",
    ) as refused:
        _bench(batch_size=3)
    assert "\n" not in str(refused.value)
    with pytest.raises(DatasetError, match="5 of 5 prompts end within 8 tokens"):
        _bench(eos_token_ids=frozenset(range(64)))


def test_answers_to_earlier_prompts_are_the_history_of_a_draft_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seen, steps = _bench(decoding=Decoding(history=25)), list[int | None](), Decoder.batch_steps

    def noted(decoder: Decoder, requests: Sequence[Request]) -> Any:
        if decoder.drafter is not None and requests[0].ending.max_new_tokens > WARM_UP_TOKENS:
            seen.append(None if requests[0].history is None else requests[0].history.num_answers)
        return steps(decoder, requests)

    monkeypatch.setattr(Decoder, "batch_steps", noted)
    assert bench.measure(Candidate(draft=SuffixDraft(), draft_length=Fixed()), [0, 1, 2, 3, 1]).num_identical == 5
    assert seen == [0, 1, 2, 2, 0], "two answers of ten tokens fit, and no prompt finds its own"
    seen.clear()
    bench.measure(CANDIDATES[0], range(3))
    assert seen == [None] * 3
