"""The plugin for vLLM, without vLLM: what requests draft, what is refused, and which versions are changed.

`.ci/engines` runs it in vLLM.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from decoding.draft_length import AdaEdl, AnyRule, BetaThompson, DraftDistribution, Fixed, TopProbability
from decoding.drafts import Draft, EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup, SuffixDraft
from decoding.exit_heads import file_sha256
from decoding.profile import Decoding, DraftProfile, TargetIdentity

SURE, UNSURE = DraftDistribution.of(0.9, 0.1), DraftDistribution.of(0.1, 9.0)
TARGET = TargetIdentity(
    model="m", architecture="LlamaForCausalLM", num_layers=6, dtype="float32", config_sha256="c", weights_sha256="w"
)
SKIP = LayerSkip.blocks((2, 3))
LOOKUP = Lookup(max_ngram=2, min_ngram=1, max_tokens=3)
TEXT = [1, 2, 3, 9, 1, 2]


def test_speed_up_is_told_from_plain_steps_that_did_not_draft_either() -> None:
    """Plain steps of 10 ms; drafting takes 4 ms, and a step that verifies writes 3 tokens of each request in 12 ms."""
    from sdtune_vllm.pace import LEAST, Pace

    pace = Pace()
    for load in (1, 4):
        for _ in range(LEAST):
            pace.step(load, 3 * load, 0.016, drafted=True)
            pace.step(load, 3 * load, 0.012, drafted=True)
            pace.step(load, load, 0.010, drafted=False)
            assert not pace.speedups.keys() - {"1"}
            pace.step(load, load, 0.014, drafted=False)
        pace.interrupt()
        pace.step(load, load, 9.0, drafted=False)  # after a prompt: not known to be of decoding alone
        pace.interrupt()
        for _ in range(20_000):
            pace.step(load, 3 * load, 0.016, drafted=True)
    assert pace.speedups == {"1": pytest.approx(30 / 16, rel=1e-3), "4-7": pytest.approx(30 / 16, rel=1e-3)}


def requests(draft: Draft, rule: AnyRule | None = None) -> Any:
    from sdtune_vllm.requests import DraftingRequests

    return DraftingRequests(draft, rule or Fixed(max_tokens=4))


def test_a_copy_comes_first_and_the_rule_is_not_asked() -> None:
    known = requests(SKIP.having(lookup=LOOKUP), AdaEdl(max_tokens=4))
    turn = known.begin("a", 0, TEXT, 0, 0, room=8)
    assert (turn.tokens, turn.most) == ([3, 9, 1], 3)
    threshold = turn.request.controller.threshold
    turn = known.begin("a", 0, [*TEXT, 8], 3, 0, room=8)  # all three were rejected
    assert turn.request.controller.threshold == threshold
    assert (turn.tokens, turn.most) == ([], 4)


def test_each_request_ends_its_draft_by_the_rule_and_by_its_room() -> None:
    known = requests(SKIP, TopProbability(max_tokens=4, threshold=0.5))
    first, second = known.begin("a", 0, [5], 0, 0, room=9), known.begin("b", 1, [6], 0, 0, room=2)
    assert [first.take(7, SURE), first.take(8, UNSURE)] == [True, False]
    assert [second.take(7, SURE), second.take(8, SURE)] == [True, False]
    assert (first.tokens, second.tokens) == ([7, 8], [7, 8])
    assert known.begin("a", 0, [5, 7, 3], 2, 1, room=0).most == 0


def test_the_state_of_a_rule_is_the_requests_own_until_it_ends() -> None:
    known = requests(SKIP, AdaEdl(max_tokens=4, persistent=True))
    for name in ("a", "b"):
        turn = known.begin(name, 0, [5], 0, 0, room=4)
        turn.take(7, SURE)
        known.drafts([turn])
    start = turn.request.controller.threshold
    moved = known.begin("a", 0, [5, 7, 8], 1, 0, room=4).request.controller.threshold
    assert moved != start == turn.request.controller.threshold
    known.end(["a"])
    assert len(known._known) == 1
    assert known.begin("c", 0, [5], 0, 0, room=4).request.controller.threshold == moved


@pytest.mark.parametrize("draft", [PromptLookup(max_ngram=2), SuffixDraft(min_token_prob=0.0)])
def test_copies_alone_have_the_rules_length(draft: Draft) -> None:
    turn = requests(draft, Fixed(max_tokens=2)).begin("a", 0, TEXT, 0, 0, room=8)
    assert turn.tokens == [3, 9]
    assert requests(draft).begin("a", 0, [1, 2, 3], 0, 0, room=8).tokens == []


def test_padding_teaches_the_rule_nothing() -> None:
    known = requests(SKIP, AdaEdl(max_tokens=4, persistent=True))
    thresholds = {}
    for name, accepted in (("padded", 3), ("as drafted", 1)):  # padding too, by chance
        drafting, idle = known.begin(name, 0, [5], 0, 0, room=4), known.begin("idle", 1, [6, 9], 0, 0, room=4)
        drafting.take(7, SURE)
        drafts = known.drafts([drafting, idle], 4 if name == "padded" else None)
        assert drafts == ({0: [7, 5, 5, 5], 1: [9] * 4} if name == "padded" else {0: [7], 1: []})
        again = known.begin(name, 0, [5, 7, 5], len(drafts[0]), accepted, room=4)
        thresholds[name] = again.request.controller.threshold
    assert thresholds["padded"] == thresholds["as drafted"]
    assert known.drafts([idle], 4) == {1: []}, "nothing is verified where no request drafts"


Mode = Enum("Mode", ["FULL", "FULL_AND_PIECEWISE"])
"""As vLLM's `CUDAGraphMode`."""


def engine(**changes: Any) -> Any:
    """Return a configuration of vLLM, as far as the plugin reads it."""
    model = {"architectures": ["LlamaForCausalLM"], "hf_text_config": SimpleNamespace(num_hidden_layers=6)}
    model |= {"is_hybrid": False, "has_inner_state": False, "is_multimodal_model": False}
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "use_ubatching": False}
    own = {"lora_config": None, "kv_transfer_config": None, "additional_config": {}}
    own |= {"compilation_config": SimpleNamespace(cudagraph_mode=Mode.FULL_AND_PIECEWISE)}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **changes.pop("model", {})}),
        parallel_config=SimpleNamespace(**{**parallel, **changes.pop("parallel", {})}),
        **{**own, **changes},
    )


@pytest.mark.parametrize(
    ("changes", "draft", "words"),
    [
        ({"parallel": {"tensor_parallel_size": 2}}, SKIP, "has to be on one device"),
        ({"parallel": {"use_ubatching": True}}, SKIP, "batches in halves"),
        ({"lora_config": object()}, SKIP, "serve the merged model"),
        ({"kv_transfer_config": object()}, SKIP, "come from elsewhere"),
        ({"compilation_config": SimpleNamespace(cudagraph_mode=Mode.FULL)}, SKIP, "vLLM itself wrote wrong texts"),
        ({"model": {"is_hybrid": True}}, SKIP, "a recurrent state"),
        ({"model": {"architectures": ["Qwen2ForCausalLM"]}}, SKIP, "the model is a Qwen2ForCausalLM of 6"),
        ({}, PlainDecoding(), "serve without --speculative-config"),
        ({}, LayerSkip(bits=8), "int8 weights, which vLLM does not make"),
        ({}, EarlyExit(exit_layer=2, head="none.safetensors", head_sha256="0" * 64), "there is no"),
        ({}, EarlyExit(exit_layer=2, head="head.safetensors", head_sha256="0" * 64), "its contents differ"),
    ],
)
def test_what_cannot_be_done_is_refused_at_the_start(
    changes: dict[str, Any], draft: Draft, words: str, tmp_path: Path
) -> None:
    from sdtune_vllm.settings import UnsupportedError, check

    (tmp_path / "head.safetensors").write_bytes(b"other")
    profile = DraftProfile(name="p", target=TARGET, draft=draft, draft_length=Fixed())
    with pytest.raises(UnsupportedError, match=words) as refused:
        check(engine(**changes), profile, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_profile_that_fits_is_taken(tmp_path: Path) -> None:
    from sdtune_vllm.settings import UnsupportedError, check, profile_of

    head = tmp_path / "head.safetensors"
    head.write_bytes(b"weights")
    draft = EarlyExit(exit_layer=2, head=head.name, head_sha256=file_sha256(head), lookup=LOOKUP)
    DraftProfile(name="p", target=TARGET, draft=draft, draft_length=Fixed(max_tokens=5)).save(tmp_path / "p.yaml")
    config = engine(additional_config={"sdtune": {"profile": str(tmp_path / "p.yaml")}})
    profile, folder = profile_of(config)
    check(config, profile, folder)
    assert profile.longest_draft == 5
    waiting = profile.model_copy(update={"draft_length": BetaThompson()})
    with pytest.raises(UnsupportedError, match="nothing measures them in vLLM"):
        check(config, waiting, folder)
    exact = profile.model_copy(update={"decoding": Decoding(runner="static", exact_width=8)})
    with pytest.raises(UnsupportedError, match="bit-exact"):
        check(config, exact, folder)
    with pytest.raises(UnsupportedError, match="give --additional-config"):
        profile_of(engine())


class Runner:
    """vLLM's model runner, as far as the plugin changes it."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        self.vllm_config, self.drafter = vllm_config, vllm_config.drafter
        self.use_aux_hidden_state_outputs = False

    def propose_draft_token_ids(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        return "theirs"

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        return False

    def capture_model(self) -> int:
        return 1


class Config:
    """vLLM's configuration of an engine."""

    num_speculative_tokens = 5

    def __init__(self, method: str, model: str) -> None:
        self.speculative_config = SimpleNamespace(method=method, model=model)
        self.recorded: list[Any] = []
        self.drafter = SimpleNamespace(
            reads_states=True, draft=lambda *given: ("ours", given[3:]), record=self.recorded.append
        )

    @property
    def num_lookahead_tokens(self) -> int:
        return 0


def test_other_methods_of_the_engine_run_as_before() -> None:
    import sdtune_vllm

    class Changed(Config):
        num_lookahead_tokens = Config.num_lookahead_tokens

    class ChangedRunner(Runner):
        pass

    assert sdtune_vllm._misfit("0.32.0", Config, Runner) is None
    sdtune_vllm._reserve_slots(Changed)
    sdtune_vllm._hand_over(ChangedRunner)
    ours, theirs = Changed("custom_class", sdtune_vllm.PROPOSER), Changed("ngram", "")
    assert (ours.num_lookahead_tokens, theirs.num_lookahead_tokens) == (5, 0)
    mine, other = ChangedRunner(ours, "cpu"), ChangedRunner(theirs, "cpu")
    assert (mine.use_aux_hidden_state_outputs, other.use_aux_hidden_state_outputs) == (True, False)
    assert (mine._input_fits_in_drafter("meta"), other._input_fits_in_drafter("meta")) == (True, False)
    given = ("scheduled", "sampled", "metadata", "hidden", "sample", "states", "spec", "common", "slots")
    assert mine.propose_draft_token_ids(*given) == ("ours", ("states", "slots"))
    assert other.propose_draft_token_ids(*given) == "theirs"
    assert (mine.capture_model(), other.capture_model()) == (1, 1)
    assert (ours.recorded, theirs.recorded) == ([mine], [])


def test_an_engine_of_another_version_is_not_changed() -> None:
    import sdtune_vllm

    class Renamed(Runner):
        def _input_fits_in_drafter(self, metadata: Any) -> bool:  # type: ignore[override]
            return False

    assert "it takes 0.31.x and 0.32.x" in str(sdtune_vllm._misfit("0.40.1", Config, Runner))
    assert "_input_fits_in_drafter has other parameters" in str(sdtune_vllm._misfit("0.32.0", Config, Renamed))
    assert "no property num_lookahead_tokens" in str(sdtune_vllm._misfit("0.32.0", object, Runner))
    assert "VLLM_PLUGINS" in str(sdtune_vllm.problem())  # nobody has called `register` here


def test_each_drafted_token_is_sampled_with_its_requests_settings() -> None:
    """vLLM's own function leaves them undefined on a CPU, and its `top_k` fails where nothing is drafted."""
    from sdtune_vllm import sampling

    def expand_batch_to_tokens(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int, replace_to: int) -> Any:
        return x.new_empty(num_tokens)

    own = expand_batch_to_tokens
    restrict = lambda logits, k, p: logits + k.max() + p  # noqa: E731
    sampler = SimpleNamespace(__name__="sampler", apply_top_k_top_p=restrict, expand_batch_to_tokens=own)
    assert sampling.mend(sampler) is None
    assert sampling.mend(sampler) is None, "a second engine of the process finds it mended"
    temperatures, counts = torch.tensor([0.0, 0.5, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = sampler.expand_batch_to_tokens(temperatures, counts, 5, replace_from=0, replace_to=1)
    assert (found.dtype, found.tolist()) == (torch.float32, [1.0, 1.0, 2.0, 2.0, 2.0])
    top_k = torch.tensor([3, 4, 5], dtype=torch.int32)
    found = sampler.expand_batch_to_tokens(top_k, counts, 5)
    assert (found.dtype, found.tolist()) == (torch.int32, [3, 3, 5, 5, 5])
    nothing = torch.zeros(0, 5)
    assert sampler.apply_top_k_top_p(nothing, nothing[:, 0], 0.0) is nothing
    assert sampler.apply_top_k_top_p(torch.zeros(1, 5), torch.tensor([3]), 1.0).tolist() == [[4.0] * 5]
    other = SimpleNamespace(__name__="vllm.sampler", expand_batch_to_tokens=own)
    assert "vLLM's sampler.apply_top_k_top_p has other parameters" in str(sampling.mend(other))


@pytest.mark.parametrize(
    ("stored", "reason"),
    [("norm", None), ("norm other", "has weights"), ("", "lacks weights of Linear: model.layers.2")],
)
def test_a_head_is_loaded_as_one_more_block_or_refused(stored: str, reason: str | None, tmp_path: Path) -> None:
    from sdtune_vllm.blocks import _fill
    from sdtune_vllm.settings import UnsupportedError

    class Target(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))

        def load_weights(self, named: Any) -> set[str]:
            for name, tensor in named:
                dict(self.named_parameters())[name].data.copy_(tensor)
            return {name for name, _ in named}

    target, head, file = Target(), torch.nn.Linear(2, 2, bias=False), tmp_path / "head.safetensors"
    names = {"norm": "weight", "other": "bias"}
    save_file({names[each]: torch.full((2, 2), 7.0) for each in stored.split()}, file)
    if reason is None:
        _fill(target, head, file)
        assert head.weight.eq(7.0).all()
    else:
        with pytest.raises(UnsupportedError, match=reason):
            _fill(target, head, file)
    assert len(target.model.layers) == 2
