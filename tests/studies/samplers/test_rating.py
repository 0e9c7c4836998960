"""The time that rating skip sets gets, beside trials of what is predicted to be faster."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import Draft, LayerSkip, PromptLookup
from decoding.text import Ending
from studies.prediction.predictor import Predictor
from studies.prediction.survey import Survey
from studies.samplers.rating import SHARE_BEHIND, Rating
from tests.support.costs import made_up_costs
from tests.support.tiny import tiny_target


def test_rating_gets_a_share_of_its_time_while_no_set_comes_near_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    target, loop = tiny_target(), tuple(index % 6 + 2 for index in range(40))
    ticks = count()
    monkeypatch.setattr("studies.samplers.rating.time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    def rated(prompt: tuple[int, ...], continuation: tuple[int, ...], pool: Draft) -> int:
        predictor = Predictor(Survey(target, [prompt], [continuation]), made_up_costs(target), max_tokens=4)
        rating = Rating(target, predictor)
        rating.rate(1, [pool])  # a second for each set
        first = rating.num_rated
        rating.rate(12, [pool])
        return rating.num_rated - first

    assert rated(loop[:16], loop[16:], PromptLookup()) == 12 * SHARE_BEHIND - 1, "copies of a loop are far faster"
    prompt = (5, 9, 2, 7)
    own = plain_decoder(target).generate(Request(prompt, Ending(24))).tokens
    assert rated(prompt, own, LayerSkip.blocks((1, 2, 3))) == 12 - 1
