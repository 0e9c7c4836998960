"""Quantised drafts write the text of plain decoding: every family, both runners, alone and in batches, greedy and sampled."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Sampling
from decoding.decode import Request, speculative
from decoding.decoder import Decoder, plain_decoder
from decoding.deploy import load_decoder
from decoding.draft_length import AdaEdl, DraftLengthRule, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup
from decoding.fingerprint import fingerprint
from decoding.profile import Decoding, DraftProfile, TargetIdentity
from decoding.rounds import Generation
from decoding.runners.features import SpeedFeatures
from decoding.runners.static import StaticRunner
from decoding.target import DraftVocabulary, Target
from decoding.target.states import exit_states
from decoding.target.views import ExitView
from decoding.text import Ending
from tests.support.chi_square import ALPHA, p_value
from tests.support.controllers import AnyLength
from tests.support.families import NUM_LAYERS, SUPPORTED, VOCABULARY, build, some_tokens, static_target_of, target_of
from tests.support.generations import write, write_plainly
from tests.support.grid import QUANTISED, RULES, WITHOUT_LINEARS
from tests.support.heads import untrained_head
from tests.support.sampled import NUM_SEQUENCES, exact_distribution, first_tokens, request_for, sampling_target

FAMILIES = [family for family in SUPPORTED if family not in WITHOUT_LINEARS]
REQUEST = Request(some_tokens(9), Ending(16))
TWO_RULES: list[DraftLengthRule] = [RULES["fixed 3"], RULES["AdaEDL, last dropped"]]
BOTH_RULES = ("llama", "gemma3")
"""One family that attends to everything, and one that attends mostly within a window."""


@functools.cache
def plain_text(family: str) -> tuple[int, ...]:
    return write_plainly(target_of(family), REQUEST).tokens


@pytest.mark.parametrize("draft", QUANTISED)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_plain_text(family: str, draft: str) -> None:
    """Every family with every draft, and each with one of two rules in turn; both rules with every draft for `BOTH_RULES`."""
    in_turn = (FAMILIES.index(family) + list(QUANTISED).index(draft)) % 2
    for number, rule in enumerate(TWO_RULES):
        if number != in_turn and family not in BOTH_RULES:
            continue
        generation = write(target_of(family), QUANTISED[draft], rule, REQUEST, prefix_reuse=bool(number))
        assert generation.tokens == plain_text(family)


@pytest.mark.parametrize("draft", QUANTISED)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_text_by_the_static_runner_is_the_plain_text(family: str, draft: str) -> None:
    for rule in TWO_RULES:
        assert write(static_target_of(family), QUANTISED[draft], rule, REQUEST).tokens == plain_text(family)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_drafts_are_right_mostly_but_not_always(family: str) -> None:
    request = Request(some_tokens(9), Ending(96))
    rates = {
        name: (generation := write(target_of(family), QUANTISED[name], Fixed(max_tokens=3), request)).num_accepted
        / generation.num_drafted
        for name in QUANTISED
    }
    assert rates["int8"] > 0.9
    assert 0.05 < rates["int4, half blocks"] < 0.9


@pytest.mark.parametrize("draft", QUANTISED)
def test_sequences_in_lockstep_write_their_plain_texts(draft: str) -> None:
    requests = [Request(some_tokens(size, size), Ending(new)) for size, new in ((5, 20), (11, 12), (3, 25))]
    for target in (target_of("llama"), static_target_of("llama")):
        plain = [plain_decoder(target).generate(request).tokens for request in requests]
        for rule in TWO_RULES:
            batch = Decoder(target, QUANTISED[draft], rule).generate_batch(requests)
            assert [each.tokens for each in batch.generations] == plain


@pytest.mark.parametrize("draft", ["int8", "int4, half blocks", "int8, exit"])
def test_whole_rounds_and_chains_write_the_plain_text(draft: str) -> None:
    features = SpeedFeatures(whole_rounds=True, look_every=3, draft_vocabulary=40, fused_projections=True)
    target = Target(build("llama"), functools.partial(StaticRunner, compiled=False, features=features))
    plain = plain_text("llama")
    for rule in TWO_RULES:
        assert write(target, QUANTISED[draft], rule, REQUEST).tokens == plain


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
def test_compiled_blocks_write_the_plain_text() -> None:
    target = Target(build("llama"), StaticRunner)
    plain = plain_text("llama")
    assert write(target, QUANTISED["int4, last block"], RULES["fixed 3"], REQUEST).tokens == plain
    assert target.runner.block_call.problem is None  # type: ignore[union-attr]


def test_bit_exact_mode_takes_quantised_drafts() -> None:
    target = Target(build("llama"), functools.partial(StaticRunner, compiled=False, exact_width=8))
    plain = write_plainly(target, REQUEST).tokens
    assert write(target, LayerSkip(bits=8), Fixed(max_tokens=4), REQUEST).tokens == plain


# --- exits with a head ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["eager", "static"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox_parallel", "mixtral"])
def test_exit_with_a_quantised_head_writes_the_plain_text(family: str, runner: str) -> None:
    target = target_of(family) if runner == "eager" else static_target_of(family)
    request = Request(REQUEST.prompt, Ending(24))  # an untrained head is seldom right
    expected = write_plainly(target_of(family), request).tokens
    for vocabulary in (None, DraftVocabulary(tuple(range(0, VOCABULARY, 2)))):
        head = untrained_head(target, vocabulary=vocabulary)
        drafter = EarlyExitDrafter(target, NUM_LAYERS - 1, head, bits=8)
        for controller in (*(rule.controller() for rule in TWO_RULES), AnyLength(3)):
            generation = Generation.collect(speculative(target, drafter, controller, request))
            assert generation.tokens == expected
            assert generation.num_accepted > 0


def test_head_reads_the_verifications_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised blocks draft from approximate states; what the head keeps of them are the whole model's."""
    target, exit_layer = target_of("llama"), NUM_LAYERS - 1
    pending = _pending_states(monkeypatch)
    drafter = EarlyExitDrafter(target, exit_layer, untrained_head(target), bits=8)
    generation = Generation.collect(speculative(target, drafter, Fixed(max_tokens=3).controller(), REQUEST))
    token_ids = torch.tensor([[*REQUEST.prompt, *generation.tokens[:-1]]])
    with torch.inference_mode():
        exact = exit_states(target, token_ids, [exit_layer])[0][exit_layer]
    known = len(REQUEST.prompt)
    for states in pending:
        expected = exact[:, known : known + states.shape[-2]]
        assert (states - expected).abs().max() < 1e-4 * expected.abs().max()
        known += states.shape[-2]
    assert known > len(REQUEST.prompt) + 10
    assert max(states.shape[-2] for states in pending) > 2, "whole rounds are read again"


def _pending_states(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the states that the head will read after each round."""
    seen: list[Tensor] = []
    genuine = ExitView.run

    def watched(self: ExitView, *args: object, **kwargs: object) -> object:
        states = args[3]
        if isinstance(states, Tensor):
            seen.append(states.clone())
        return genuine(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(ExitView, "run", watched)
    return seen


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "processors"),
    [
        (LayerSkip(bits=4), "temperature, penalty and top-k"),
        (LayerSkip(skip_attention=(1,), bits=8), "temperature"),
    ],
    ids=["int4", "int8"],
)  # processors see logits, and not the bits of the weights that they come from
def test_sampled_text_is_distributed_as_the_model(draft: Draft, processors: str) -> None:
    target = sampling_target()
    drafter = build_drafter(target, draft)
    assert drafter is not None
    request = request_for(processors, Sampling(torch.Generator().manual_seed(7)))
    controller = Fixed(max_tokens=3).controller()
    counts = Counter(first_tokens(speculative(target, drafter, controller, request)) for _ in range(NUM_SEQUENCES))
    assert p_value(counts, exact_distribution(processors)) > ALPHA


# --- production -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [LayerSkip(bits=8, lookup=Lookup()), EarlyExit(exit_layer=3, bits=4)])
def test_profile_decodes_in_generate(draft: Draft, tmp_path: Path) -> None:
    model = build("llama")
    found = fingerprint(model)
    identity = TargetIdentity(
        model="tiny",
        architecture="LlamaForCausalLM",
        num_layers=NUM_LAYERS,
        dtype="float32",
        config_sha256=found.config_sha256,
        weights_sha256=found.weights_sha256,
    )
    rule = AdaEdl(max_tokens=4)
    profile = DraftProfile(name="tiny", target=identity, draft=draft, draft_length=rule, decoding=Decoding())
    profile.save(tmp_path / "profile.yaml")
    assert DraftProfile.load(tmp_path / "profile.yaml").draft == draft
    decoder, prompt = load_decoder(tmp_path / "profile.yaml"), torch.tensor([some_tokens(9)])
    expected = model.generate(prompt, max_new_tokens=24, do_sample=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=24, custom_generate=decoder), expected)
