"""The sequence's buffer, the shaping of scores, and the stopping conditions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.drafts import PromptLookup
from decoding.text import Ending, Shaping, TokenSequence

CPU = torch.device("cpu")


def text_of(*tokens: int, capacity: int = 16) -> TokenSequence:
    return TokenSequence(tokens, capacity, CPU)


def test_drafts_follow_the_sequence_until_tokens_are_appended() -> None:
    text = text_of(5, 6)
    for index, token in enumerate((1, 2, 3)):
        text.write(index, torch.tensor([token]))
    assert text.length == 2
    assert text.span(2, 5).tolist() == [[1, 2, 3]]
    text.append([1, 9])
    assert (text.length, text.num_generated) == (4, 2)
    assert text.span(0, text.length).tolist() == [[5, 6, 1, 9]]


def test_tokens_on_the_host_exclude_drafts() -> None:
    text = text_of(5, 6)
    assert list(text.token_ids) == [5, 6]
    text.write_drafts([1, 2])
    assert list(text.token_ids) == [5, 6]
    text.append([1, 9])
    text.append((4,))
    assert list(text.token_ids) == text.span(0, text.length)[0].tolist() == [5, 6, 1, 9, 4]


def test_index_is_made_once_for_equal_settings_and_grows_with_the_sequence() -> None:
    text = text_of(5, 6, 5)
    pairs = PromptLookup(max_ngram=2, min_ngram=2)
    assert text.index(PromptLookup()) is text.index(PromptLookup()) is not text.index(pairs)
    assert (text.index(PromptLookup()).copy(1), text.index(pairs).copy(1)) == ([6], None)
    text.write_drafts([6])
    assert text.index(pairs).copy(1) is None
    text.append([6])
    assert (text.index(PromptLookup()).copy(1), text.index(pairs).copy(1)) == ([5], [5])


def test_span_is_a_view_of_the_buffer() -> None:
    text = text_of(5, 6)
    assert text.span(1, 2).data_ptr() == text.span(0, 2).data_ptr() + text.span(0, 2).element_size()


class Noting:
    """A logits processor that records the tokens it receives and adds one to the scores."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.shape == (1, 4)
        self.seen.append(input_ids[0].tolist())
        return scores + 1.0


def test_processors_see_the_sequence_and_the_preceding_drafts() -> None:
    text, noting = text_of(5, 6), Noting()
    for index, token in enumerate((1, 2)):
        text.write(index, torch.tensor([token]))
    scores = Shaping([noting]).all(text, torch.zeros(3, 4))
    assert noting.seen == [[5, 6], [5, 6, 1], [5, 6, 1, 2]]
    assert scores.tolist() == [[1.0] * 4] * 3


def test_draft_and_verification_shape_a_token_alike() -> None:
    text, noting = text_of(5, 6), Noting()
    text.write(0, torch.tensor([1]))
    logits = torch.arange(8.0).reshape(2, 4)
    together = Shaping([noting]).all(text, logits)
    alone = Shaping([noting]).one(text, 1, logits[1:])
    assert noting.seen[1] == noting.seen[2] == [5, 6, 1]
    assert torch.equal(together[1], alone)


def test_processors_work_in_order_and_on_single_precision() -> None:
    text = text_of(5)

    def double(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert scores.dtype == torch.float32
        return 2.0 * scores

    logits = torch.ones(1, 4, dtype=torch.bfloat16)
    assert Shaping([double, Noting()]).one(text, 0, logits).tolist() == [3.0] * 4
    assert Shaping([Noting(), double]).one(text, 0, logits).tolist() == [4.0] * 4
    assert Shaping().one(text, 0, logits).dtype == Shaping().all(text, logits).dtype == torch.float32


def append(ending: Ending, *tokens: int, text: TokenSequence | None = None) -> tuple[tuple[int, ...], bool]:
    text = text or text_of(5, 6)
    text.write_drafts(tokens)
    return ending.append(text, tokens)


def test_tokens_are_cut_at_the_most_that_may_be_generated() -> None:
    assert append(Ending(4), 1, 2, 3) == ((1, 2, 3), False)
    assert append(Ending(3), 1, 2, 3) == ((1, 2, 3), True)
    assert append(Ending(2), 1, 2, 3) == ((1, 2), True)


def test_text_counts_down_to_its_end() -> None:
    text, ending = text_of(5, 6), Ending(4)
    assert ending.remaining(text) == 4
    ending.append(text, [1, 2, 3])
    assert ending.remaining(text) == 1
    assert ending.append(text, [4, 4]) == ((4,), True)
    assert (text.num_generated, ending.remaining(text)) == (4, 0)


def test_end_token_is_kept_and_what_follows_is_not() -> None:
    for criteria in ((), (lambda ids, scores: False,)):
        ending = Ending(9, frozenset({2, 8}), criteria)
        assert append(ending, 1, 2, 3) == ((1, 2), True)
        assert append(ending, 8) == ((8,), True)
        assert append(ending, 1, 3) == ((1, 3), False)


def test_end_token_in_the_prompt_ends_nothing() -> None:
    assert append(Ending(9, frozenset({5, 6})), 1, 3) == ((1, 3), False)


def test_criterion_ends_the_text_at_the_token_it_is_met_at() -> None:
    ending = Ending(9, criteria=[lambda ids, scores: ids[0, -1] == 2])
    text = text_of(5, 6)
    assert append(ending, 1, 2, 3, text=text) == ((1, 2), True)
    assert text.span(0, text.length).tolist() == [[5, 6, 1, 2]]


def test_every_criterion_is_evaluated_after_each_token_including_the_last() -> None:
    seen: list[list[list[int]]] = [[], [], []]

    def noting(which: int, met_at: int) -> Any:
        def criterion(ids: Tensor, scores: Tensor | None) -> Tensor:
            seen[which].append(ids[0].tolist())
            return torch.tensor([ids.shape[1] == met_at])

        return criterion

    ending = Ending(9, frozenset({3}), [noting(0, met_at=99), noting(1, met_at=4), noting(2, met_at=99)])
    assert append(ending, 1, 2, 3) == ((1, 2), True)
    assert seen == [[[5, 6, 1], [5, 6, 1, 2]]] * 3
    assert append(ending, 3, 1) == ((3,), True)
    assert [shown[-1] for shown in seen] == [[5, 6, 3]] * 3


@pytest.mark.parametrize("answer", [True, torch.tensor(True), torch.tensor([True])], ids=["bool", "scalar", "vector"])
def test_criteria_may_answer_as_transformers_lets_them(answer: Any) -> None:
    assert append(Ending(9, criteria=[lambda ids, scores: answer]), 1, 2) == ((1,), True)


def test_zero_new_tokens_are_refused() -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"at least one token must be generated, got max_new_tokens={number}"):
            Ending(number)
