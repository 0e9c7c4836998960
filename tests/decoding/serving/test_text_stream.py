"""Text of tokens piece by piece: what the tokenizer makes of all of them, up to a stop string."""

from __future__ import annotations

import random

from decoding.serving.service import TextStream
from tests.support.byte_tokenizer import BOS, byte_tokenizer
from tests.support.tiny import tiny_tokenizer

TEXT = "naïve 日本 🙂 = f(x)\n\n"


def _pieces(tokens: list[int], stops: tuple[str, ...] = (), seed: int = 0) -> tuple[list[str], TextStream]:
    """Feed tokens in groups of random sizes."""
    stream, chance, pieces = TextStream(byte_tokenizer(), stops), random.Random(seed), []
    while tokens:
        size = chance.randint(1, 4)
        pieces.append(stream.add(tokens[:size]))
        tokens = tokens[size:]
    return [*pieces, stream.finish()], stream


def test_pieces_are_the_whole_text_and_hold_whole_characters() -> None:
    tokens = byte_tokenizer()(TEXT)["input_ids"]
    pieces, stream = _pieces(tokens)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.num_tokens == len(tokens)


def test_words_keep_their_spaces() -> None:
    stream = TextStream(tiny_tokenizer(), ())
    tokens = tiny_tokenizer()("w1 w2 w3 w4")["input_ids"]
    assert "".join([stream.add([token]) for token in tokens] + [stream.finish()]) == "w1 w2 w3 w4"


def test_stop_strings() -> None:
    cases: list[tuple[tuple[str, ...], str, bool]] = [
        (("(x",), "naïve 日本 🙂 = f", True),
        (("f(x)\n\n",), "naïve 日本 🙂 = ", True),
        (("本 🙂", "= f"), "naïve 日本 🙂 = "[: 8 - 1], True),
        (("\n\n\n",), TEXT, False),
        (("n",), "", True),
    ]
    for stops, expected, is_stopped in cases:
        for seed in range(4):
            pieces, stream = _pieces([*byte_tokenizer()(TEXT)["input_ids"], BOS], stops, seed)
            assert "".join(pieces) == expected
            assert stream.is_stopped is is_stopped


def test_tokens_are_counted_up_to_the_stop_string() -> None:
    tokens = byte_tokenizer()("abcdef")["input_ids"]
    stream = TextStream(byte_tokenizer(), ("cd",))
    assert stream.add(tokens) == "ab"
    assert stream.num_tokens == len(byte_tokenizer()("abcd")["input_ids"])
    assert stream.add([5]) == stream.finish() == ""
