"""The heat in an engine: what a short one has tried, in which order, and who races."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, PromptLookup
from decoding.profile import TargetIdentity
from studies.contract import Candidate
from studies.measurement import Measurement, PromptSample
from tests.support.records import record
from tests.support.tiny import tiny_llama
from tuner.engines.candidates import EngineRules, own_lookups
from tuner.errors import EngineError
from tuner.progress import Progress
from tuner.search.engine import Heat

EXIT = Candidate(draft=EarlyExit(exit_layer=2), draft_length=Fixed(max_tokens=3))
SKIP = Candidate(draft=LayerSkip.blocks((1, 3)), draft_length=Fixed(max_tokens=3))


class PlantedEngine:
    """A bench in an engine whose speed-ups are given by draft; notes what was measured."""

    def __init__(self, speedups: dict[type, float], *, most: int = 99, refused: type | None = None) -> None:
        self._speedups, self._most, self._refused = speedups, most, refused
        self.tried: list[Candidate] = []

    def measure(self, candidate: Candidate, indices: list[int]) -> Measurement:
        assert indices == [4, 5]
        self.tried.append(candidate)
        if self._refused is type(candidate.draft):
            raise EngineError("refused")
        return Measurement(samples=tuple(self._sample(candidate, index) for index in indices))

    def _sample(self, candidate: Candidate, index: int) -> PromptSample:
        tokens = 19
        return PromptSample(
            prompt=index,
            plain_seconds=float(tokens),
            plain_tokens=tokens,
            draft_seconds=tokens / self._speedups.get(type(candidate.draft), 1.0),
            draft_tokens=tokens,
            rounds=0,
            drafted=0,
            accepted=0,
            identical=True,
        )

    def may_go_on(self) -> bool:
        return len(self.tried) < self._most

    def heat(self) -> Heat:
        identity = TargetIdentity(
            model="tiny", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
        )
        rules = EngineRules("llama.cpp", identity, tiny_llama().config, model="tiny")
        program: Any = SimpleNamespace(starts_at_once=True, title="llama.cpp")
        bench: Any = self
        return Heat(program, rules, bench, Progress())

    def race(self, count: int = 3) -> list[Candidate]:
        trials = [record(number=number, candidate=each) for number, each in enumerate((EXIT, SKIP))]
        heat = self.heat()
        heat.run(trials, [4, 5, 6], self.may_go_on)
        return [each.candidate for each in heat.entrants(count)]


def test_a_short_heat_has_tried_the_best_draft_and_the_engines_own_lookups() -> None:
    engine = PlantedEngine({}, most=1 + len(own_lookups()))
    engine.race()
    assert [type(each.draft) for each in engine.tried] == [*[PromptLookup] * len(own_lookups()), EarlyExit]


@pytest.mark.parametrize(("fast", "slow"), [(EarlyExit, LayerSkip), (LayerSkip, EarlyExit)])
def test_other_lengths_of_the_fastest_draft_come_first_and_each_draft_races(fast: type, slow: type) -> None:
    engine = PlantedEngine({fast: 1.4, slow: 1.1, PromptLookup: 1.2})
    best = engine.race()
    others = [type(each.draft) for each in engine.tried[2 + len(own_lookups()) :]]
    assert others == [fast] * (len(others) // 2) + [slow] * (len(others) // 2)
    assert len(others) == 8, "three lengths and a threshold of each"
    assert [type(each.draft) for each in best] == [fast, PromptLookup, slow]
    assert len({each.key for each in engine.tried}) == len(engine.tried)


def test_a_draft_that_is_slow_on_every_prompt_does_not_race_unless_all_are() -> None:
    drafts = {type(each.draft) for each in PlantedEngine({LayerSkip: 0.7, EarlyExit: 1.1}).race()}
    assert drafts == {EarlyExit, PromptLookup}
    best = PlantedEngine({LayerSkip: 0.6, EarlyExit: 0.7}, refused=PromptLookup).race(1)
    assert [type(each.draft) for each in best] == [EarlyExit]


def test_an_engine_that_refuses_everything_is_an_error() -> None:
    engine = PlantedEngine({}, refused=PromptLookup).heat()
    with pytest.raises(EngineError, match=r"llama\.cpp runs none of the"):
        engine.run([], [4, 5], lambda: True)


def test_no_more_candidates_race_than_time_is_planned_for() -> None:
    best = PlantedEngine({EarlyExit: 1.4, LayerSkip: 1.3, PromptLookup: 1.2}).race(2)
    assert [type(each.draft) for each in best] == [EarlyExit, PromptLookup]
