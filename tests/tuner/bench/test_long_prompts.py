"""Prompts of a wanted length: texts put before them, cuts, and too little text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.tiny import tiny_tokenizer
from tuner.bench.long_prompts import at_length
from tuner.errors import DatasetError
from tuner.inputs.encoding import PromptEncoder
from tuner.inputs.prompts import Prompt

TOKENIZER = tiny_tokenizer()
ENCODER = PromptEncoder(TOKENIZER)


def prompt(row: int, *words: int) -> Prompt:
    text = " ".join(f"w{word}" for word in words)
    return Prompt(row, tuple(TOKENIZER(text)["input_ids"]), text)


FILLERS = [prompt(10, 1, 2, 3), prompt(11, 4, 5), prompt(12, 6, 7, 8, 9)]


def test_short_prompts_get_other_texts_in_front_and_end_as_before() -> None:
    short = [prompt(0, 20, 21), prompt(1, 30), prompt(2, 40, 41, 42)]
    longer = at_length(short, 7, FILLERS, ENCODER)
    assert [len(each.token_ids) for each in longer] == [7, 7, 7]
    assert [each.row for each in longer] == [0, 1, 2]
    for before, after in zip(short, longer, strict=True):
        assert after.token_ids[-len(before.token_ids) :] == before.token_ids
    assert [each.text.split()[-len(b.token_ids) - 1] for each, b in zip(longer, short, strict=True)] == [
        "w3",
        "w5",
        "w9",
    ]


def test_long_prompts_are_cut_from_the_left_and_fitting_ones_stay() -> None:
    whole = prompt(0, 20, 21, 22, 23)
    (cut,) = at_length([whole], 2, FILLERS, ENCODER)
    assert cut.token_ids == whole.token_ids[-2:]
    assert cut.text.split() == ["w22", "w23"]
    assert at_length([whole], 4, [], ENCODER) == [whole]


def test_a_prompt_is_not_filled_with_itself() -> None:
    (longer,) = at_length([FILLERS[0]], 6, FILLERS, ENCODER)
    assert longer.text.count("w3") == 1


def test_too_little_text_is_told() -> None:
    with pytest.raises(DatasetError, match=r"too little text for prompts of 12 tokens: row 0 .* makes 11"):
        at_length([prompt(0, 20, 21)], 12, FILLERS, ENCODER)


def test_no_room_beside_special_tokens_is_told() -> None:
    class Marked:
        """A tokenizer that puts a mark before every text."""

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [0, *TOKENIZER(text)["input_ids"]]}

    with pytest.raises(DatasetError, match="--context 1 leaves no room"):
        at_length([Prompt(0, (0, 5, 6), "w3 w4")], 1, [], PromptEncoder(Marked()))
