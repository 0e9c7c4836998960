"""The heat in an engine: what a short one has tried, and which other draft lengths come first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, LayerSkip, PromptLookup
from decoding.profile import TargetIdentity
from studies.contract import Candidate
from tests.support.records import record
from tests.support.tiny import tiny_llama
from tuner.engines.candidates import own_lookups
from tuner.engines.rules import EngineRules
from tuner.progress import Unwatched
from tuner.search.in_engine import EngineArena

EXIT = Candidate(draft=EarlyExit(exit_layer=2), draft_length=Fixed(max_tokens=3))
SKIP = Candidate(draft=LayerSkip.blocks((1, 3)), draft_length=Fixed(max_tokens=3))


class Heat:
    """A heat of two prompts whose speed-ups are given by draft; notes what was measured."""

    def __init__(self, speedups: dict[Any, float], most: int = 99) -> None:
        self._speedups, self._most = speedups, most
        self.tried: list[Candidate] = []

    def measure(self, candidate: Candidate, indices: list[int]) -> Any:
        assert indices == [4, 5]
        self.tried.append(candidate)
        return SimpleNamespace(is_lossless=True, speedup=self._speedups.get(type(candidate.draft), 1.0))

    def may_go_on(self) -> bool:
        return len(self.tried) < self._most

    def run(self) -> list[Candidate]:
        identity = TargetIdentity(
            model="tiny", architecture="A", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
        )
        rules = EngineRules("llama.cpp", identity, tiny_llama().config, model="tiny")
        program = SimpleNamespace(starts_at_once=True, title="llama.cpp")
        servers: Any = SimpleNamespace(program=program, exports=SimpleNamespace(rules=rules))
        task: Any = SimpleNamespace(config=SimpleNamespace(finalists=3))
        trials = [record(number=number, candidate=each) for number, each in enumerate((EXIT, SKIP))]
        bench: Any = self
        arena = EngineArena(task, servers, "1")
        found = arena.entrants(trials, [4, 5, 6], bench=bench, may_go_on=self.may_go_on, progress=Unwatched())
        return [each.candidate for each in found]


def test_a_short_heat_has_tried_the_best_draft_and_the_engines_own_lookups() -> None:
    heat = Heat({}, most=1 + len(own_lookups()))
    heat.run()
    assert [type(each.draft) for each in heat.tried] == [EarlyExit, *[PromptLookup] * len(own_lookups())]


@pytest.mark.parametrize(("fast", "slow"), [(EarlyExit, LayerSkip), (LayerSkip, EarlyExit)])
def test_other_lengths_of_the_fastest_draft_come_first_and_each_draft_races(fast: type, slow: type) -> None:
    heat = Heat({fast: 1.4, slow: 0.7, PromptLookup: 1.2})
    best = heat.run()
    others = [type(each.draft) for each in heat.tried[2 + len(own_lookups()) :]]
    assert others == [fast] * (len(others) // 2) + [slow] * (len(others) // 2)
    assert len(others) == 8, "three lengths and a threshold of each"
    assert [type(each.draft) for each in best] == [fast, PromptLookup, slow]
    assert len({each.key for each in heat.tried}) == len(heat.tried)
