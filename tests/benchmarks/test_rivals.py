"""The rival searches follow their papers' rules: what they propose, their schedules and stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.searches import rivals
from benchmarks.searches.bayes import suggest_point
from benchmarks.searches.rivals import RIVALS, DraftVerify, Rival, Swift, odd_blocks
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import AdaptiveExit
from decoding.drafts import LayerSkip
from decoding.target import DraftView
from decoding.text import Ending
from tests.support.tiny import tiny_target

pytestmark = pytest.mark.benchmarks
NUM_LAYERS, NUM_SKIPPED = 8, 5  # int(2 * (8 - 2) * 0.45)


@pytest.fixture(scope="module")
def bench() -> Any:
    """What rivals know of a bench: the model, prompts and the model's own outputs."""
    target = tiny_target(NUM_LAYERS)
    prompts = ((5, 9, 14, 3, 7, 21), (8, 40, 2, 33), (11, 12, 50))
    outputs = [plain_decoder(target).generate(Request(prompt, Ending(40))).tokens for prompt in prompts]
    return SimpleNamespace(target=target, prompts=prompts, continuations=tuple(outputs))


def planted(draft: LayerSkip) -> float:
    """A speed-up with a known optimum: skipping attention from block 4 on is free, any other skip lowers acceptance."""
    free = sum(block >= 4 for block in draft.skip_attention)
    return 1.0 + 0.1 * free - 0.05 * (sum(block < 4 for block in draft.skip_attention) + len(draft.skip_mlp))


def worth(self: Rival, draft: LayerSkip) -> float:
    """A matchness below 0.9, another for nearly every set: the deeper what is skipped, the better."""
    return sum(0.01 * block for block in draft.skip_attention) + sum(0.0103 * block for block in draft.skip_mlp)


def run(rival: Rival, count: int, speedup: Callable[[LayerSkip], float | None] = planted) -> list[LayerSkip]:
    drafts = []
    while len(drafts) < count and (draft := rival.next_set()) is not None:
        rival.learn(draft, speedup(draft))
        drafts.append(draft)
    return drafts


def test_all_but_random_start_from_the_odd_blocks(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swift, "matchness", worth)
    for name, make in RIVALS.items():
        drafts = run(make(bench, 0), 3)
        assert (drafts[0] == odd_blocks(NUM_LAYERS)) == (name != "skip_sets_random")
        assert (len(drafts) == 1) == (name == "odd_layers")
        assert drafts == run(make(bench, 0), 3), "the seed decides"


def test_random_and_swift_skip_exactly_their_share_of_the_middle(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Swift, "matchness", worth)
    for name in ("skip_sets_random", "swift"):
        for draft in run(RIVALS[name](bench, 1), 8)[1:]:
            assert len(draft.skip_attention) + len(draft.skip_mlp) == NUM_SKIPPED
            assert {*draft.skip_attention, *draft.skip_mlp} <= set(range(1, NUM_LAYERS - 1))


def test_swift_asks_the_process_for_every_25th_candidate(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def suggest(points: Sequence[Any], values: Sequence[float], *, size: int, kappa: float, rng: Any) -> Any:
        assert (size, kappa, len(points)) == (12, 2.5, len(values))
        asked.append(len(points))
        return rng.random(size)

    monkeypatch.setattr(Swift, "matchness", worth)
    monkeypatch.setattr(rivals, "suggest_point", suggest)
    search = Swift(bench, 0)
    run(search, 9)
    assert asked == list(range(24, len(search.scores), 25)) != []


@pytest.mark.parametrize(
    ("scores", "num_scored"),
    [([0.2, 0.5, 0.96], 3), ([0.2, 0.5, 0.1], 302), ([0.0005 * index for index in range(1100)], 1000)],
)
def test_swift_stops_as_its_code_does(
    bench: Any, monkeypatch: pytest.MonkeyPatch, scores: Sequence[float], num_scored: int
) -> None:
    index = iter(range(2000))
    monkeypatch.setattr(Swift, "matchness", lambda self, draft: scores[min(next(index), len(scores) - 1)])
    monkeypatch.setattr(rivals, "suggest_point", lambda *args, size, rng, **rest: rng.random(size))
    search = Swift(bench, 0)
    run(search, 1500)
    assert len(search.scores) == num_scored


def test_swift_scores_the_share_of_tokens_that_a_parallel_pass_predicts(bench: Any) -> None:
    target, draft = bench.target, LayerSkip(skip_attention=(2, 5), skip_mlp=(1, 4, 6))
    shares = []
    for prompt, output in zip(bench.prompts, bench.continuations, strict=True):
        cache = target.new_cache(len(prompt) + Swift.WINDOW)
        target.forward(torch.tensor([list(prompt)]), cache, 0)
        view = DraftView(target, draft.skip_attention, draft.skip_mlp, keep_boundary=False)
        # Token by token through one cache: each reads the draft's own keys and values of those before.
        predicted = [
            int(view.run(torch.tensor([[output[i]]]), cache, len(prompt) + i).logits.argmax())
            for i in range(Swift.WINDOW)
        ]
        shares.append(np.mean(np.array(predicted) == output[1 : Swift.WINDOW + 1]))
    assert 0.0 < np.mean(shares) < 1.0
    assert Swift(bench, 0).matchness(draft) == pytest.approx(np.mean(shares))


def test_draft_and_verify_counts_a_failure_as_the_slowest_known(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[float]] = []

    def suggest(points: Sequence[Any], values: Sequence[float], *, size: int, kappa: float, rng: Any) -> Any:
        assert (size, kappa, len(points)) == (2 * NUM_LAYERS, 2.576, len(values))
        told.append(list(values))
        return rng.random(size)

    monkeypatch.setattr(rivals, "suggest_point", suggest)
    speedups = iter([None, 1.2, None, 1.1, 1.3])
    drafts = run(DraftVerify(bench, 0), 5, lambda draft: next(speedups))
    assert told == [[], [1.2, 1.2], [1.2, 1.2, 1.2], [1.1, 1.2, 1.1, 1.1]]
    assert {0, NUM_LAYERS - 1} <= {block for draft in drafts for block in draft.skip_attention}
    assert DraftVerify.draft_length == AdaptiveExit(max_tokens=8, initial_threshold=0.8)


def test_tpe_learns_switch_by_switch(bench: Any) -> None:
    found = [planted(draft) for draft in run(RIVALS["skip_sets_tpe"](bench, 3), 40)]
    assert np.mean(found[-10:]) > np.mean(found[1:11]) + 0.05


def test_a_process_is_highest_where_its_values_are() -> None:
    corners = [np.array([float(a), float(b)]) for a in (0, 1) for b in (0, 1)]
    point = suggest_point(corners, [0.0, 0.0, 1.0, 0.0], size=2, kappa=0.0, rng=np.random.default_rng(0))
    assert point == pytest.approx([1.0, 0.0], abs=0.3)
    assert suggest_point([], [], size=5, kappa=1.0, rng=np.random.default_rng(0)).shape == (5,)
