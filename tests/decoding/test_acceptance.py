"""The acceptance functions on small tensors; `test_sampling` shows that they are exact in distribution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Sampling, accept_certain, accept_greedy, accept_sampled, sample
from tests.support.waits import waits


def ids(*tokens: int) -> Tensor:
    return torch.tensor(tokens, dtype=torch.long)


def outcome(verdict: Tensor) -> tuple[int, int]:
    """Return the number of accepted drafts and the token after them."""
    num_accepted, token, *_ = verdict.tolist()
    return num_accepted, token


def rows(*probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities)


def test_greedy_accepts_up_to_the_first_disagreement() -> None:
    cases: list[tuple[list[int], list[int], tuple[int, int]]] = [
        ([], [7], (0, 7)),
        ([4], [4, 9], (1, 9)),
        ([4], [5, 9], (0, 5)),
        ([1, 2, 3], [1, 2, 3, 8], (3, 8)),
        ([1, 2, 3], [1, 2, 6, 8], (2, 6)),
        ([1, 2, 3], [6, 2, 3, 8], (0, 6)),
        ([1, 2, 3], [1, 6, 3, 8], (1, 6)),  # agreement after the first disagreement does not count
    ]
    for drafted, choices, expected in cases:
        assert outcome(accept_greedy(ids(*drafted), ids(*choices))) == expected


def test_residual_that_rounding_leaves_empty_is_sampled_from_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    # Here q is p, and the largest draw there is; rounding alone decides whether it is below q.
    q = rows([0.5, 0.5])
    p = rows([0.5, 0.5], [1.0, 0.0])
    monkeypatch.setattr(torch, "rand", lambda *size, **settings: torch.ones(*size))
    num_accepted, token = outcome(accept_sampled(ids(0), q, p, torch.Generator().manual_seed(0)))
    assert num_accepted == 0
    assert token in (0, 1)


def test_certain_drafts_are_judged_as_those_sampled_from_one_point() -> None:
    p = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), dim=-1)
    drafted = ids(0, 3, 3)
    points = torch.nn.functional.one_hot(drafted, 6).float()
    outcomes = set()
    for seed in range(60):
        judged = outcome(accept_certain(drafted, p, torch.Generator().manual_seed(seed)))
        assert judged == outcome(accept_sampled(drafted, points, p, torch.Generator().manual_seed(seed)))
        outcomes.add(judged)
    assert {num_accepted for num_accepted, _ in outcomes} >= {0, 1}
    assert not {(0, 0), (1, 3), (2, 3)} & outcomes, "a rejected draft is not resampled"


def test_certain_draft_and_certain_target_always_give_the_targets_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = rows([0.0, 1.0], [1.0, 0.0])
    assert outcome(accept_certain(ids(1), p)) == (1, 0)
    assert outcome(accept_certain(ids(0), p)) == (0, 1)
    monkeypatch.setattr(torch, "rand", lambda *size, **settings: torch.ones(*size))
    assert outcome(accept_certain(ids(1), p)) == (0, 1)  # the residual is empty: the target's token, not an error


def test_sampling_never_draws_what_a_processor_removed() -> None:
    sampling = Sampling(torch.Generator().manual_seed(0))
    scores = torch.tensor([0.0, float("-inf"), 1.0])
    assert {int(sampling.choose(scores)[0]) for _ in range(200)} == {0, 2}
    outcomes = {outcome(sampling.accept(ids(0), rows([1.0, 0.0, 0.0]), scores.repeat(2, 1)))[1] for _ in range(60)}
    assert outcomes == {0, 2}


@pytest.mark.parametrize("num_drafted", [0, 4])
def test_the_verdict_stays_on_the_device(num_drafted: int) -> None:
    p = torch.softmax(torch.randn(num_drafted + 1, 6, generator=torch.Generator().manual_seed(1)), dim=-1)
    drafted = torch.zeros(num_drafted, dtype=torch.long)
    for judge in (
        lambda: accept_greedy(drafted, p.argmax(dim=-1)),
        lambda: accept_sampled(drafted, p[:-1], p),
        lambda: accept_certain(drafted, p),
    ):
        with waits() as asked:
            verdict = judge()
        assert asked == []
        assert verdict.shape == (2 + num_drafted,)
        assert torch.equal(verdict[2:], drafted)


def test_greedy_judges_sequences_of_different_widths_together() -> None:
    drafted, choices = (
        torch.tensor([[1, 2, 3], [1, 2, 3], [4, 0, 0]]),
        torch.tensor([[1, 2, 3, 8], [1, 6, 3, 8], [4, 0, 0, 9]]),
    )
    verdicts = accept_greedy(drafted, choices, torch.tensor([3, 3, 1]))
    assert verdicts.tolist() == [[3, 8, 1, 2, 3], [1, 6, 1, 2, 3], [1, 0, 4, 0, 0]]


def test_samples_are_those_of_multinomial() -> None:
    """The same race on the same random stream, without its checks: they read the device."""
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))
    for seed in range(20):
        expected = torch.multinomial(weights, 1, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(sample(weights, torch.Generator().manual_seed(seed)), expected)
