"""Proposals of skip sets: knapsacks, growing sets and moves, on predictions that a test makes up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from decoding.draft_length import Fixed, RoundCosts
from decoding.drafts import EarlyExit, LayerSkip
from studies.prediction.predictors import Prediction
from studies.prediction.proposals import Proposals, knapsacks
from studies.prediction.replay import Replayed
from studies.space import SkipSpace
from tests.support.tiny import tiny_target

NUM_LAYERS = 6


@dataclass
class MadeUp:
    """A predictor in which each skipped sublayer costs `harm` tokens per round and saves a fixed time."""

    harm: dict[tuple[str, int], float]
    looked_at: list[LayerSkip] = field(default_factory=list)
    survey: Any = field(default_factory=lambda: SimpleNamespace(target=SimpleNamespace(num_layers=NUM_LAYERS)))

    @property
    def num_drafts(self) -> int:
        return len(self.looked_at)

    def best(self, wanted: LayerSkip | EarlyExit) -> Prediction:
        draft = wanted.skipped(NUM_LAYERS)
        self.looked_at.append(draft)
        agreement = 1.0
        for sublayer in sublayers(draft):
            agreement *= 1 - self.harm[sublayer]
        cost = 1000 * (1 + self.costs(draft).draft_step) / (1 + agreement)
        replayed = Replayed(tokens=1000, rounds=500, draft_passes=500, cost=cost)
        return Prediction(draft, Fixed(max_tokens=1), replayed, agreement, agreement)

    def costs(self, draft: LayerSkip) -> RoundCosts:
        return RoundCosts(draft_step=1.0 - 0.07 * len(sublayers(draft)), verify=(1.0, 1.0))


def sublayers(draft: LayerSkip) -> list[tuple[str, int]]:
    return [("attention", i) for i in draft.skip_attention] + [("mlp", i) for i in draft.skip_mlp]


def everywhere(harm: float, but: Iterable[tuple[str, int]] = (), less: float = 0.01) -> dict[tuple[str, int], float]:
    all_of_them = [(kind, index) for kind in ("attention", "mlp") for index in range(NUM_LAYERS)]
    return {sublayer: less if sublayer in set(but) else harm for sublayer in all_of_them}


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up predictions have no states and no confidences."""
    monkeypatch.setattr("studies.prediction.proposals.cosine_skips", lambda survey, counts: [(1, 2)])
    monkeypatch.setattr("studies.prediction.proposals.confident_skips", lambda survey: ({}, []))


@pytest.fixture(scope="module")
def space() -> SkipSpace:
    return SkipSpace.of(tiny_target(NUM_LAYERS))


def test_items_may_be_whole_blocks() -> None:
    space = SkipSpace.of(tiny_target(NUM_LAYERS), whole_blocks=True)
    assert space.items == tuple(LayerSkip.blocks((index,)) for index in range(NUM_LAYERS))
    with pytest.raises(ValueError, match="parts of the items"):
        space.chosen(LayerSkip(skip_attention=(1,)))


def rated_best_first(space: SkipSpace, predictor: MadeUp, most: int) -> list[Prediction]:
    proposals = Proposals(space, predictor)  # type: ignore[arg-type]
    for count, _ in enumerate(proposals.rate(), 1):
        if proposals.knows_items and count >= most:
            break
    return proposals.best_first()


def test_what_can_be_left_out_without_harm_is_found(space: SkipSpace) -> None:
    harmless = [("attention", 1), ("attention", 3), ("mlp", 2), ("mlp", 3), ("attention", 5)]
    best = rated_best_first(space, MadeUp(everywhere(0.3, harmless)), 200)[0]
    assert set(sublayers(best.draft)) == set(harmless)  # type: ignore[arg-type]


def test_best_of_all_sets_is_found_where_harms_differ(space: SkipSpace) -> None:
    harm = {(kind, i): 0.02 + 0.031 * ((7 * i + 5 * (kind == "mlp")) % 11) for kind, i in everywhere(0)}
    predictor = MadeUp(harm)
    best = rated_best_first(space, predictor, 300)[0]
    rated = MadeUp(harm)
    exhaustive = max(
        rated.best(space.draft(chosen)).speedup for size in range(1, 13) for chosen in combinations(range(12), size)
    )
    assert best.speedup == pytest.approx(exhaustive)


def test_effort_is_bounded_and_the_best_come_first(space: SkipSpace) -> None:
    predictor = MadeUp(everywhere(0.1, [("mlp", 2)]))
    found = rated_best_first(space, predictor, 60)
    assert predictor.num_drafts == 60
    assert [each.speedup for each in found] == sorted((each.speedup for each in found), reverse=True)
    assert len({each.draft for each in found}) == len(found)
    assert LayerSkip() not in {each.draft for each in found}


@pytest.mark.parametrize("seed", range(2))
def test_knapsacks_do_the_least_harm_for_what_they_save(seed: int) -> None:
    harms = [((seed + 3) * (index + 2) * 37 % 19 + 1) / 10 for index in range(7)]
    savings = [1.0 + (index % 2) for index in range(7)]
    for chosen in knapsacks(harms, savings, 6):
        harm, saved = (sum(values[index] for index in chosen) for values in (harms, savings))
        others = [other for size in range(8) for other in combinations(range(7), size)]
        enough = [other for other in others if sum(savings[index] for index in other) >= saved - 1e-9]
        assert harm == pytest.approx(min(sum(harms[index] for index in other) for other in enough))


def test_sets_without_neighbours_are_proposed_where_skips_in_a_row_do_more_harm(space: SkipSpace) -> None:
    """Skips in a row multiply their harm, which single skips cannot show."""

    class InARow(MadeUp):
        def best(self, wanted: LayerSkip | EarlyExit) -> Prediction:
            prediction = super().best(wanted)
            found = set(sublayers(wanted.skipped(NUM_LAYERS)))
            pairs = sum((kind, index + 1) in found for kind, index in found)
            agreement = prediction.agreement * 0.5**pairs
            cost = 1000 * (1 + self.costs(wanted.skipped(NUM_LAYERS)).draft_step) / (1 + agreement)
            return replace(prediction, replayed=replace(prediction.replayed, cost=cost), agreement=agreement)

    proposals = Proposals(space, InARow(everywhere(0.02)))  # type: ignore[arg-type]
    list(proposals.rate())
    best = proposals.best_first()[0]
    assert "spaced" in str(proposals.origin(best.draft))
    assert len(sublayers(best.draft)) == NUM_LAYERS, "every other attention and every other MLP"  # type: ignore[arg-type]


@pytest.mark.parametrize("num_harmless", [1, 7])
def test_along_the_order_of_harm_the_best_count_is_found(space: SkipSpace, num_harmless: int) -> None:
    sublayers_of_all = list(everywhere(0))
    harmless = sublayers_of_all[::2][:num_harmless] + sublayers_of_all[1::2][: max(num_harmless - 6, 0)]
    predictor = MadeUp(everywhere(0.4, harmless[:num_harmless]))
    found = rated_best_first(space, predictor, 12 + NUM_LAYERS + 12)
    assert set(sublayers(found[0].draft)) == set(harmless[:num_harmless])  # type: ignore[arg-type]


def test_rating_may_stop_after_any_set_and_go_on(space: SkipSpace) -> None:
    harm = everywhere(0.3, [("attention", 1), ("mlp", 2), ("mlp", 3)])
    in_one_go = [prediction.draft for prediction in Proposals(space, MadeUp(harm)).rate()]  # type: ignore[arg-type]
    proposals = Proposals(space, MadeUp(harm))  # type: ignore[arg-type]
    rating = proposals.rate()
    begun = [next(rating).draft for _ in range(2 * NUM_LAYERS)]
    assert not proposals.is_under_way, "the last of the single items is not rated yet"
    assert len(proposals.best_first()) == 2 * NUM_LAYERS - 1, "all but the empty set"
    assert begun + [prediction.draft for prediction in rating] == in_one_go
    assert proposals.is_under_way


def proposing(monkeypatch: pytest.MonkeyPatch, *sets: tuple[int, ...], remarks: tuple[str, ...] = ()) -> None:
    """Let ConfLayers propose these sets of blocks."""
    found = {blocks: f"conf_layers (by test, lambda {n})" for n, blocks in enumerate(sets)}
    monkeypatch.setattr("studies.prediction.proposals.confident_skips", lambda survey: (found, remarks))


def test_sets_of_conf_layers_are_rated_before_sets_that_need_many_passes(
    space: SkipSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposing(monkeypatch, (1, 3), (2, 3))
    proposals = Proposals(space, MadeUp(everywhere(0.1)))  # type: ignore[arg-type]
    rating = proposals.rate()
    first = [next(rating).draft for _ in range(NUM_LAYERS + 1)]
    assert {LayerSkip.blocks((1, 3)), LayerSkip.blocks((2, 3))} <= set(first)
    next(rating)
    assert proposals.is_under_way, "there are sets worth measuring"
    assert not proposals.knows_items


def test_the_report_can_say_who_proposed_a_set(space: SkipSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    proposing(monkeypatch, (1, 2))
    proposals = Proposals(space, MadeUp(everywhere(0.3)))  # type: ignore[arg-type]
    list(proposals.rate())
    origins = {prediction.draft: proposals.origin(prediction.draft) for prediction in proposals.best_first()}
    assert origins[LayerSkip.blocks((1, 2))] == "conf_layers (by test, lambda 0); also cosine, growing"
    assert str(origins[LayerSkip.blocks((4, 5))]).startswith("exit"), "blocks 4 and 5 left out are an exit at 4"
    assert str(origins[LayerSkip(skip_mlp=(3,))]).startswith("single sublayer")
    assert None not in origins.values()


def test_a_set_reached_by_moves_names_the_set_they_started_from(
    space: SkipSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but one of the harmless blocks are in the set of ConfLayers, and no single move from elsewhere helps."""
    proposing(monkeypatch, (1, 2, 3))
    harmless = [(kind, index) for index in (1, 2, 3, 4) for kind in ("attention", "mlp")]
    proposals = Proposals(space, MadeUp(everywhere(0.5, harmless, less=0.0)))  # type: ignore[arg-type]
    list(proposals.rate())
    moved = {
        origin
        for prediction in proposals.best_first()
        if (origin := str(proposals.origin(prediction.draft))).startswith("moves")
    }
    assert moved
    assert all(origin.startswith("moves (from ") for origin in moved)
