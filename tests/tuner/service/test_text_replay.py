"""Texts of production replayed: candidates in the order in which decoding would find them, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, PromptLookup
from decoding.profile import Decoding
from decoding.serving import kept_texts
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate
from studies.costs.table import CostTable
from tests.support.costs import made_up_costs
from tests.support.tiny import tiny_target
from tuner.drift import contract
from tuner.drift.contract import ObservedText
from tuner.service import text_replay
from tuner.service.contract import PredictedCandidate, TextReplay
from tuner.service.retuning import NUM_KNOWN, first_measured
from tuner.service.text_replay import rate, survey_texts

REPEATING = ([18, 63, 34, 33, 27, 60], [52, 55, 21, 63, 32, 24], [59, 56, 45, 23, 32, 37])
"""Prompts that the tiny model goes on from in loops, which a lookup copies."""
VARIED = ([39, 59, 60, 15, 34, 10], [59, 11, 21, 8, 48, 6])
"""Prompts that it goes on from without repeating itself much."""
LOOKUP = Candidate(draft=PromptLookup(max_ngram=2), draft_length=Fixed(max_tokens=4))
EXIT = Candidate(draft=EarlyExit(exit_layer=2), draft_length=Fixed(max_tokens=1))
SKIP = Candidate(draft=LayerSkip.blocks((1, 2)), draft_length=Fixed(max_tokens=5))
KNOWN = (EXIT, LOOKUP, SKIP)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def costs(target: Target) -> CostTable:
    return made_up_costs(target, max_tokens=8)


def _texts(target: Target, prompts: Sequence[Sequence[int]]) -> list[ObservedText]:
    """What a server keeps of these prompts."""
    plain = plain_decoder(target)
    return [
        ObservedText(
            number=number + 1, prompt=tuple(prompt), continuation=plain.generate(Request(prompt, Ending(24))).tokens
        )
        for number, prompt in enumerate(prompts)
    ]


def _surveyed(target: Target, texts: Sequence[ObservedText], batch_size: int = 1) -> tuple[list[tuple[int, ...]], int]:
    """The prompts that are surveyed, and the number of texts that are not."""
    found = survey_texts(target, texts, decoding=Decoding(), heads=None, batch_size=batch_size, seed=0)
    return ([], len(texts)) if found is None else ([prompt for prompt, _ in found[0].written], found[1])


def _decoded(target: Target, costs: CostTable, prompts: Sequence[Sequence[int]], candidate: Candidate) -> float:
    """The speed-up of a candidate that really decodes these prompts, charged with the same costs."""
    runs_model = candidate.draft.runs_model
    of_rounds = costs.round_costs(candidate.draft if runs_model else LayerSkip(), 8, context=18, prefix_reuse=True)
    tokens, charged = 0, 0.0
    for prompt in prompts:
        found = Decoder(target, candidate.draft, candidate.draft_length).generate(Request(prompt, Ending(24)))
        tokens += found.num_decoded
        counts = [each.num_drafted for each in found.rounds]
        charged += sum(of_rounds.of(count) if runs_model else of_rounds.verify_cost(count) for count in counts)
    return tokens / charged


@pytest.mark.parametrize("prompts", [REPEATING, VARIED], ids=["repeating", "varied"])
def test_candidates_come_in_the_order_that_decoding_finds(
    target: Target, costs: CostTable, prompts: Sequence[Sequence[int]]
) -> None:
    found = survey_texts(target, _texts(target, prompts), decoding=Decoding(), heads=None, batch_size=1, seed=0)
    assert found is not None
    survey, left_out = found
    rated = rate(survey, costs, KNOWN, Decoding(), 8)
    predicted = {candidate.key: prediction.speedup for candidate, prediction in rated}
    assert (left_out, len(survey.indices)) == (0, len(prompts))
    assert list(predicted.values()) == sorted(predicted.values(), reverse=True)
    assert predicted.keys() > {each.key for each in KNOWN}, "lookups are tried beside them"
    decoded = {each.key: _decoded(target, costs, prompts, each) for each in KNOWN}
    by_prediction = [each.key for each, _ in rated if each in KNOWN]
    assert by_prediction == sorted(decoded, key=lambda key: -decoded[key])
    assert predicted[LOOKUP.key] == pytest.approx(decoded[LOOKUP.key], rel=0.02)
    assert by_prediction[0] == (LOOKUP.key if prompts is REPEATING else EXIT.key)


def test_texts_that_the_model_does_not_write_are_left_out(target: Target) -> None:
    first, second, third, fourth = _texts(target, [*REPEATING, VARIED[0]])
    sampled = first.model_copy(update={"continuation": (*first.continuation[:-1], 3)})
    unknown = second.model_copy(update={"prompt": (999,)})
    too_long = third.model_copy(update={"prompt": third.prompt * 60})
    texts = [sampled, unknown, too_long, fourth]
    assert _surveyed(target, texts) == ([fourth.prompt], 3)
    assert _surveyed(target, texts[:3]) == ([], 3)
    assert _surveyed(target, []) == ([], 0)
    other = tiny_target(seed=1)
    assert _surveyed(other, [first, second, third, fourth]) == ([], 4), "another model"


def test_the_newest_texts_are_replayed_in_whole_batches(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = _texts(target, [*REPEATING, *VARIED])
    assert _surveyed(target, texts, batch_size=2)[0] == [each.prompt for each in texts[:0:-1]]
    assert _surveyed(target, texts[:1], batch_size=2)[0] == [texts[0].prompt]
    monkeypatch.setattr(text_replay, "REPLAYED_TOKENS", 30)
    assert _surveyed(target, texts)[0] == [each.prompt for each in texts[:2:-1]]


def test_the_champion_is_measured_in_any_case() -> None:
    others = [Candidate(draft=LayerSkip.blocks((block,)), draft_length=Fixed()) for block in range(7)]
    assert first_measured([*others, EXIT], EXIT) == [*others[:NUM_KNOWN], EXIT]
    assert first_measured([others[0], EXIT, *others[1:]], EXIT) == [others[0], EXIT, *others[1:NUM_KNOWN]]
    assert first_measured(others, None) == others[:NUM_KNOWN]


def test_of_each_draft_only_the_best_rule_is_measured_first() -> None:
    first, second, third = (LOOKUP.with_rule(Fixed(max_tokens=length)) for length in (2, 3, 4))
    assert first_measured([first, second, EXIT, third, SKIP], None) == [first, EXIT, SKIP]
    assert first_measured([first, second, EXIT, third], third) == [first, EXIT, third], "but for the champion"


def test_a_prediction_is_called_one() -> None:
    predicted = [
        PredictedCandidate(description="prompt lookup", origin="lookup", predicted_speedup=1.5),
        PredictedCandidate(description="exit", origin="champion", predicted_speedup=0.9),
    ]
    found = TextReplay(texts=7, left_out=2, predicted=predicted).describe()
    assert "replayed 7 texts of production (2 left out" in found
    assert found.endswith("predicted best 1.50x, prompt lookup; the champion 0.90x")
    assert TextReplay(texts=0, left_out=2).describe().startswith("no text of production to replay: 2 left out")


def test_both_ends_have_the_same_bounds() -> None:
    for name in ("LONGEST_PROMPT", "LONGEST_CONTINUATION"):
        assert getattr(contract, name) == getattr(kept_texts, name)
    assert kept_texts.MOST_SHOWN <= contract.MOST_TEXTS
