"""Recorded passes under the rules of CUDA graphs: every drafter, rule, batch and family writes the eager text.

The second half plants defects in passes, and checks that they are found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.decoder import Decoder, plain_decoder
from decoding.runners.buckets import GPU_BUCKETS
from decoding.target import Target
from tests.support.fake_graphs import FakeGraphs, RecordingError
from tests.support.families import PROMISED, build, target_of
from tests.support.grid import RULES
from tests.support.recorded_decoding import (
    DRAFTS,
    FAMILIES,
    HEAD,
    alone_and_together,
    decoder_of,
    recorded_target,
    requests,
)


@functools.cache
def fake_graphs_of(family: str) -> tuple[Target, FakeGraphs]:
    """Return a target that was checked under the rules of graphs too."""
    graphs = FakeGraphs()
    return recorded_target(family, graphs), graphs


@functools.cache
def eager_texts(family: str) -> list[tuple[int, ...]]:
    return [plain_decoder(target_of(family)).generate(request).tokens for request in requests()]


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_text_is_the_eager_text(family: str, tmp_path: Path) -> None:
    """Every third draft and all rules in turn, with and without prefix reuse in turns: three families decode every draft."""
    (target, graphs), plain = fake_graphs_of(family), eager_texts(family)
    replayed, first = graphs.num_replayed, FAMILIES.index(family) % 3
    drafts = list(DRAFTS) if family in PROMISED else ["half blocks", "exit", HEAD]
    for number, draft in enumerate(drafts[first::3]):
        rule = list(RULES.values())[(3 * number + first) % len(RULES)]
        decoder = decoder_of(target, draft, rule, tmp_path, prefix_reuse=number % 2 == 0)
        assert alone_and_together(decoder) == [plain[-1], *plain], f"{draft}, {rule.describe()}"
        assert graphs.strangers(decoder) == []
    assert graphs.num_replayed > replayed


@pytest.mark.parametrize("draft", ["half blocks", HEAD])
def test_sampled_text_is_the_eager_decoders(draft: str, tmp_path: Path) -> None:
    target, graphs = fake_graphs_of("llama")
    replayed, rule = graphs.num_replayed, RULES["AdaEDL, last dropped"]
    eager = decoder_of(target_of("llama"), draft, rule, tmp_path / "eager")
    decoder = decoder_of(target, draft, rule, tmp_path)
    found = alone_and_together(decoder, sampled=True)
    assert found == alone_and_together(eager, sampled=True)
    assert found[1:] != eager_texts("llama")
    assert graphs.num_replayed > replayed
    assert graphs.strangers(decoder) == []


def test_text_that_outgrows_its_recordings_is_the_eager_text() -> None:
    """The passes read 256 slots at first, and 512 later."""
    graphs, long = FakeGraphs(), {"max_position_embeddings": 512}
    target = recorded_target("gemma3", graphs, **long)
    (request,) = requests([(GPU_BUCKETS.slot_step - 12, 24)])
    expected = plain_decoder(Target(build("gemma3", **long))).generate(request).tokens
    assert plain_decoder(target).generate(request).tokens == expected
    assert Decoder(target, DRAFTS["half blocks"], RULES["fixed 3"]).generate(request).tokens == expected
    assert graphs.num_replayed > 24


# --- wrong passes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """Outputs of the passes below."""

    tensor: Tensor

    def copied(self) -> Value:
        return Value(self.tensor.clone())


def play_twice(run: Callable[[], Value], given: Tensor, graphs: FakeGraphs | None = None) -> list[list[float]]:
    """Record a pass for the input 1 and replay it for 2 and 3."""
    found = []
    given.fill_(1.0)
    first, play = (graphs or FakeGraphs()).record(run)
    for number in (2.0, 3.0):
        given.fill_(number)
        found.append(play().tensor.tolist())
    return [first.tensor.tolist(), *found]


def test_a_number_of_the_host_stays_what_it_was() -> None:
    given, position = torch.zeros(1), [1.0]

    def run() -> Value:
        position[0] += 1.0
        return Value(given * position[0])

    assert play_twice(run, given) == [[2.0], [6.0], [9.0]]


def test_memory_that_nothing_has_written_is_poisoned() -> None:
    given = torch.zeros(1)

    def run() -> Value:
        return Value(torch.empty(2).index_copy_(0, torch.arange(1), given))

    for _, unwritten in play_twice(run, given)[1:]:
        assert unwritten != unwritten, "not a number"


def test_waiting_for_the_host_is_an_error() -> None:
    given = torch.ones(3)
    waits: list[Callable[[Tensor], Tensor]] = [
        lambda given: given * given[0].item(),
        lambda given: given if given.sum() > 0 else -given,
        lambda given: given[given > 0],
        lambda given: torch.multinomial(given, 1),
        lambda given: given + torch.tensor([1.0]),
        lambda given: given.nonzero(),
        lambda given: given * given.tolist()[0],
        lambda given: given.cpu(),
        lambda given: given.repeat_interleave(given.long()),
        lambda given: torch.full_like(given, given.max()),
    ]
    for wait in waits:
        with pytest.raises(RecordingError, match="waits for the host"):
            FakeGraphs().record(partial(lambda wait: Value(wait(given)), wait))


def test_memory_that_was_freed_is_an_error() -> None:
    given, scratch = torch.ones(3), [torch.ones(3)]
    _, play = FakeGraphs().record(lambda: Value(given + scratch[0]))
    assert play().tensor.tolist() == [2.0] * 3
    scratch[0] = torch.ones(3)
    with pytest.raises(RecordingError, match="memory that was freed"):
        play()
