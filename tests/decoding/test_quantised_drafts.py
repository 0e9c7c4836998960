"""Quantised drafts: how often they are right, and modes of the static runner beside those of `test_lossless`'s grid."""

from __future__ import annotations

from functools import partial

from decoding.decode import Request
from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import build, some_tokens, target_of
from tests.support.generations import write, write_plainly
from tests.support.recorded_decoding import DRAFTS

REQUEST = Request(some_tokens(9), Ending(16))


def test_drafts_are_right_mostly_but_not_always() -> None:
    request = Request(some_tokens(9), Ending(96))
    generations = [
        write(target_of("llama"), DRAFTS[draft], Fixed(max_tokens=3), request)
        for draft in ("int8", "int4, half blocks")
    ]
    rates = [generation.num_accepted / generation.num_drafted for generation in generations]
    assert rates[0] > 0.9
    assert 0.05 < rates[1] < 0.9


def test_bit_exact_mode_takes_quantised_drafts() -> None:
    target = Target(build("llama"), partial(StaticRunner, compiled=False, exact_width=8))
    plain = write_plainly(target, REQUEST).tokens
    assert write(target, LayerSkip(bits=8), Fixed(max_tokens=4), REQUEST).tokens == plain
