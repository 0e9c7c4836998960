"""Recorded passes under the rules of CUDA graphs: every drafter, rule, batch and family writes the eager text.

The second half plants defects in passes and in recorders, and checks that they are found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Leaves, accept_leaf_greedy
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import DraftLengthRule
from decoding.runners.buckets import GPU_BUCKETS
from decoding.runners.features import SpeedFeatures
from decoding.target import Target
from tests.support.fake_graphs import FakeGraphs, RecordingError
from tests.support.families import build, target_of
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
from tests.support.recorders import unchecked
from tests.support.wrong_graphs import EmptyGraphs, ForgetfulGraphs, SharingGraphs, UnpoisonedGraphs, WrongGraphs


@functools.cache
def fake_graphs_of(family: str) -> tuple[Target, FakeGraphs]:
    """Return a target that was checked under the rules of graphs too."""
    graphs = FakeGraphs()
    return recorded_target(family, graphs), graphs


@functools.cache
def fake_graphs_with(features: SpeedFeatures) -> tuple[Target, FakeGraphs]:
    graphs = FakeGraphs()
    with unchecked():
        return recorded_target("llama", graphs, features=features), graphs


@functools.cache
def eager_texts(family: str) -> list[tuple[int, ...]]:
    return [plain_decoder(target_of(family)).generate(request).tokens for request in requests()]


# --- the same text ----------------------------------------------------------------------------------------------------


def check(family: str, draft: str, rules: Sequence[DraftLengthRule], folder: Path) -> None:
    """Decode with every rule, with and without prefix reuse in turns."""
    target, graphs = fake_graphs_of(family)
    replayed, plain = graphs.num_replayed, eager_texts(family)
    for number, rule in enumerate(rules):
        prefix_reuse = (list(DRAFTS).index(draft) + number) % 2 == 0
        decoder = decoder_of(target, draft, rule, folder, prefix_reuse=prefix_reuse)
        assert alone_and_together(decoder) == [plain[-1], *plain], rule
        assert graphs.strangers(decoder) == []
    assert graphs.num_replayed > replayed


@pytest.mark.parametrize("draft", DRAFTS)
def test_replayed_text_is_the_eager_text(draft: str, tmp_path: Path) -> None:
    first = list(DRAFTS).index(draft)
    check("llama", draft, list(RULES.values())[first % 3 :: 3], tmp_path)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_replayed_text_of_every_family_is_the_eager_text(family: str, tmp_path: Path) -> None:
    """Two drafts, one rule each, for each family: neighbours in the list have others."""
    number, rules = FAMILIES.index(family), list(RULES.values())
    for turn in (0, 1):
        draft = list(DRAFTS)[(2 * number + turn) % len(DRAFTS)]
        check(family, draft, [rules[(number + 5 * turn) % len(rules)]], tmp_path)


@pytest.mark.parametrize("draft", ["plain", "half blocks", "exit", HEAD, "lookup, then blocks"])
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


LOOKING = "AdaEDL, last dropped"
FUSED = SpeedFeatures(fused_projections=True)
SMALL_VOCABULARY = SpeedFeatures(draft_vocabulary=32)
SELDOM = SpeedFeatures(look_every=3)
WHOLE = SpeedFeatures(whole_rounds=True)
ALL_FEATURES = SpeedFeatures(
    fused_projections=True, draft_vocabulary=32, plain_chain=4, look_every=3, whole_rounds=True
)


@pytest.mark.parametrize(
    ("features", "draft", "rule"),
    [
        (FUSED, "half blocks", "fixed 8"),
        (SMALL_VOCABULARY, "half blocks", "fixed 8"),
        (SMALL_VOCABULARY, HEAD, LOOKING),
        (SpeedFeatures(plain_chain=4), "plain", "fixed 1"),
        (SELDOM, "half blocks", LOOKING),
        (SELDOM, HEAD, LOOKING),
        (WHOLE, "half blocks", "fixed 8"),
        (ALL_FEATURES, "plain", "fixed 1"),
        (ALL_FEATURES, HEAD, LOOKING),
    ],
)
def test_text_with_speed_features_is_the_eager_text(
    features: SpeedFeatures, draft: str, rule: str, tmp_path: Path
) -> None:
    (target, graphs), plain = fake_graphs_with(features), eager_texts("llama")
    decoder, replayed = decoder_of(target, draft, RULES[rule], tmp_path), graphs.num_replayed
    assert alone_and_together(decoder) == [plain[-1], *plain]
    assert graphs.num_replayed > replayed
    assert graphs.strangers(decoder) == []


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_text_that_outgrows_its_recordings_is_the_eager_text(family: str) -> None:
    """The passes read 256 slots at first, and 512 later."""
    graphs, long = FakeGraphs(), {"max_position_embeddings": 512}
    target = recorded_target(family, graphs, **long)
    (request,) = requests([(GPU_BUCKETS.slot_step - 12, 24)])
    expected = plain_decoder(Target(build(family, **long))).generate(request).tokens
    assert plain_decoder(target).generate(request).tokens == expected
    assert Decoder(target, DRAFTS["half blocks"], RULES["fixed 3"]).generate(request).tokens == expected
    assert graphs.num_replayed > 24


# --- wrong recorders --------------------------------------------------------------------------------------------------


def plain_text_with(recorder: WrongGraphs) -> tuple[int, ...]:
    """Decode with a recorder that is right while the target is checked, which would refuse it, and wrong afterwards."""
    recorder.is_wrong = False
    target = recorded_target("llama", recorder)
    recorder.is_wrong = True
    text = plain_decoder(target).generate(requests()[-1]).tokens
    assert recorder.num_replayed > 0
    return text


@pytest.mark.parametrize("graphs", [EmptyGraphs, ForgetfulGraphs])
def test_wrong_recorder_writes_another_text(graphs: type[WrongGraphs]) -> None:
    assert plain_text_with(graphs()) != eager_texts("llama")[-1]


def test_outputs_in_shared_memory_are_no_tokens() -> None:
    with pytest.raises(IndexError):
        plain_text_with(SharingGraphs())


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


def test_a_pass_over_fixed_memory_follows_its_input() -> None:
    given = torch.zeros(2)
    assert play_twice(lambda: Value(given * 10), given) == [[10.0, 10.0], [20.0, 20.0], [30.0, 30.0]]


def test_recording_leaves_memory_as_it_was() -> None:
    given, counter = torch.ones(1), torch.zeros(1)
    graphs = FakeGraphs()
    _, play = graphs.record(lambda: Value(counter.add_(given)))
    assert counter.item() == 1.0, "the warm-up counts, the recording does not"
    assert play().tensor.item() == 2.0


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


def test_without_poison_outputs_that_were_not_copied_seem_right() -> None:
    """The reason for poisoning after a replay too."""
    given = torch.zeros(1)
    assert play_twice(lambda: Value(given * 10), given, UnpoisonedGraphs()) == [[10.0], [20.0], [30.0]]
    assert play_twice(lambda: Value(given * 10), given, SharingGraphs())[1:] != [[20.0], [30.0]]


@pytest.mark.parametrize(
    "wait",
    [
        lambda given: given * given[0].item(),
        lambda given: given if given.sum() > 0 else -given,
        lambda given: given[given > 0],
        lambda given: torch.multinomial(given, 1),
        lambda given: given + torch.tensor([1.0]),
        lambda given: given.nonzero(),
        lambda given: given * given.tolist()[0],
        lambda given: given + given.new_tensor([1.0]),
        lambda given: given + torch.as_tensor([1.0]),
        lambda given: given.cpu(),
        lambda given: given.unique(),
        lambda given: given.repeat_interleave(given.long()),
        lambda given: torch.full_like(given, given.max()),
    ],
)
def test_waiting_for_the_host_is_an_error(wait: Callable[[Tensor], Tensor]) -> None:
    given = torch.ones(3)
    with pytest.raises(RecordingError, match="waits for the host"):
        FakeGraphs().record(lambda: Value(wait(given)))


def test_choosing_among_side_leaves_waits_for_nothing() -> None:
    drafted, choices = torch.tensor([3, 5]), torch.tensor([3, 7, 1, 4, 9])
    leaves = Leaves(torch.tensor([6, 7]), (1, 1))
    assert leaves.table.tolist() == [[0], [1]], "made before"
    first, play = FakeGraphs().record(lambda: Value(accept_leaf_greedy(drafted, leaves, choices)))
    assert first.tensor.tolist() == play().tensor.tolist() == [1, 1, 7, 9, 3, 5]


def test_memory_that_was_freed_is_an_error() -> None:
    given, scratch = torch.ones(3), [torch.ones(3)]
    _, play = FakeGraphs().record(lambda: Value(given + scratch[0]))
    assert play().tensor.tolist() == [2.0] * 3
    scratch[0] = torch.ones(3)
    with pytest.raises(RecordingError, match="memory that was freed"):
        play()


def test_memory_of_nobody_is_a_stranger() -> None:
    graphs, given, scratch = FakeGraphs(), torch.ones(3), torch.ones(2, 3)
    _, play = graphs.record(lambda: Value(given + scratch[0]))
    assert graphs.strangers({"buffer": given, "others": [scratch]}) == []
    (stranger,) = graphs.strangers({"buffer": given})
    assert stranger.size == (2, 3)
    del play
    assert graphs.strangers() == [], "recordings that are gone read nothing"
