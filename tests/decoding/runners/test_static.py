"""Fixed-shape passes: the same output under any padding, storage reuse across sequences, one compiled block."""

from __future__ import annotations

import functools
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from decoding.cache.kv_cache import KVCache
from decoding.decode import Request, autoregressive, speculative
from decoding.decoder import Decoder
from decoding.draft_length import AdaEdl, Fixed
from decoding.drafters.build import build_drafter
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.drafts import Draft, LayerSkip, Lookup, SuffixDraft
from decoding.errors import UnsupportedRunnerError
from decoding.exit_heads import new_exit_head
from decoding.losslessness import compare
from decoding.profile import Decoding
from decoding.rounds import Generation
from decoding.runners.buckets import CPU_BUCKETS, GPU_BUCKETS, Buckets
from decoding.runners.compilation import CompiledBlocks
from decoding.runners.contract import Outputs, Part, PassRequest
from decoding.runners.eager import EagerRunner
from decoding.runners.masks import MaskKinds
from decoding.runners.static import StaticRunner
from decoding.runners.tape import Tapes
from decoding.target import TappedView, Target
from decoding.text import Ending, TokenSequence
from tests.support.families import NUM_LAYERS, SUPPORTED, WINDOW, build, some_tokens, target_of
from tests.support.generations import plain_text, write
from tests.support.grid import RULES, SKIPS
from tests.support.recorders import CountingRecorder, unchecked

PROMPT = some_tokens(9)
NUM_NEW_TOKENS = 12
FAMILIES = [family for family in SUPPORTED if family != "bloom"]
EVERY_BUCKET = ("llama", "gemma3")
EVERYTHING_PADDED = Buckets(widths=(16,), slot_step=32)
BUCKETS = {"exact widths": CPU_BUCKETS, "padded widths": GPU_BUCKETS, "one width": EVERYTHING_PADDED}
CHECKED = "padded widths"
DRAFTS: dict[str, Draft] = {
    "mixed": SKIPS["mixed"],
    "first mlp": SKIPS["first mlp"],
    "last block": SKIPS["last block"],
    "lookup, then attention": LayerSkip(skip_attention=(1, 3), lookup=Lookup(max_tokens=4)),
    "suffix automaton": SuffixDraft(),
}
DROPS_LAST = RULES["AdaEDL, last dropped"]


def unwrapped(buckets: Buckets = CPU_BUCKETS) -> Callable[[MaskKinds, torch.device], EagerRunner]:
    """Make static runners that compile nothing. With a CPU's buckets they record tapes, as compiled ones do."""

    def make(masks: MaskKinds, device: torch.device) -> StaticRunner:
        recorder = Tapes() if buckets is CPU_BUCKETS else None
        return StaticRunner(masks, device, compiled=False, buckets=buckets, recorder=recorder)

    return make


@functools.cache
def static_target(family: str, buckets: str = CHECKED) -> Target:
    """Return a target for all tests; one of each family was compared with the eager model when it was made."""
    with nullcontext() if buckets == CHECKED else unchecked():
        return Target(build(family), unwrapped(BUCKETS[buckets]))


def plainly(target: Target, request: Request) -> tuple[int, ...]:
    return Generation.collect(autoregressive(target, request)).tokens


# --- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_output_equals_the_eager_runners(family: str, draft: str) -> None:
    """Every family with every draft and all buckets, one of them with each draft; every combination for two families."""
    request = Request(PROMPT, Ending(NUM_NEW_TOKENS))
    turn = FAMILIES.index(family) + list(DRAFTS).index(draft)
    for number in range(len(BUCKETS)) if family in EVERY_BUCKET else [turn % len(BUCKETS)]:
        rule, target = (RULES["fixed 3"], DROPS_LAST)[number % 2], static_target(family, list(BUCKETS)[number])
        generation = write(target, DRAFTS[draft], rule, request, prefix_reuse=number < 2)
        assert generation.tokens == plain_tokens(family), list(BUCKETS)[number]


@functools.cache
def plain_tokens(family: str) -> tuple[int, ...]:
    """Decode plainly with the eager runner."""
    return plainly(target_of(family), Request(PROMPT, Ending(NUM_NEW_TOKENS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_output_equals_the_eager_runners(family: str) -> None:
    for buckets in BUCKETS:
        assert plainly(static_target(family, buckets), Request(PROMPT, Ending(NUM_NEW_TOKENS))) == plain_tokens(family)


@pytest.mark.parametrize(("family", "prefix_reuse"), [("llama", True), ("gemma3n", True), ("gpt2", False)])
def test_exit_with_a_head_writes_the_same_text(family: str, prefix_reuse: bool) -> None:
    request = Request(PROMPT, Ending(NUM_NEW_TOKENS))
    rules = [Fixed(max_tokens=3), AdaEdl(max_tokens=6, initial_threshold=0.5, keep_last=False)]
    for number, buckets in enumerate(BUCKETS, start=prefix_reuse):
        target = static_target(family, buckets)
        drafter = EarlyExitDrafter(target, NUM_LAYERS - 2, new_exit_head(target), prefix_reuse=prefix_reuse)
        generation = Generation.collect(speculative(target, drafter, rules[number % 2].controller(), request))
        assert generation.tokens == plain_tokens(family)
        assert generation.num_drafted > 0


def test_head_drafts_as_with_the_eager_runner() -> None:
    """The head's keys and values are right too: the same drafts are accepted, round by round."""
    request, lengths = Request(PROMPT, Ending(3 * NUM_NEW_TOKENS)), []
    for target in (Target(build("llama")), static_target("llama", "one width")):
        drafter = EarlyExitDrafter(target, 3, new_exit_head(target))
        generation = Generation.collect(speculative(target, drafter, Fixed(max_tokens=4).controller(), request))
        lengths.append([step.num_accepted for step in generation.rounds])
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 2


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_text_many_windows_long_is_the_same(family: str) -> None:
    request = Request(some_tokens(3 * WINDOW), Ending(8 * WINDOW))
    expected = plainly(target_of(family), request)
    target = static_target(family)
    assert plainly(target, request) == expected
    assert write(target, SKIPS["last block"], Fixed(max_tokens=2 * WINDOW), request).tokens == expected


def test_eager_attention_receives_additive_masks() -> None:
    request = Request(PROMPT, Ending(NUM_NEW_TOKENS))
    model = build("llama", attn_implementation="eager")
    assert plainly(Target(model, unwrapped()), request) == plainly(Target(model), request)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_storage_of_a_finished_sequence_serves_the_next() -> None:
    target = Target(build("llama"), unwrapped())
    first, second = target.new_cache(20), target.new_cache(20)
    assert first.storage is not second.storage, "two simultaneous sequences do not share"
    left = first.storage
    del first
    gc.collect()
    assert target.new_cache(30).storage is left
    long = target.new_cache(1000)
    assert long.storage.capacity >= 1000 + CPU_BUCKETS.widest


def test_storage_that_is_too_small_is_dropped_with_its_recordings() -> None:
    target = Target(build("llama"), unwrapped())
    runner = target.runner
    assert isinstance(runner, StaticRunner)
    plainly(target, Request(PROMPT, Ending(8)))
    (prepared,) = runner._prepared.values()
    (small,) = {key[1] for key in prepared}
    long = Request(some_tokens(200), Ending(8))
    assert plainly(target, long) == plainly(Target(build("llama")), long)
    assert small not in {key[1] for key in prepared}
    assert len({key[1] for key in prepared}) == len(runner._storages) == 1
    sizes = [storage.capacity for storage in runner._storages]
    plainly(target, Request(PROMPT, Ending(8)))
    assert [storage.capacity for storage in runner._storages] == sizes, "the larger one serves short sequences too"


def test_remains_of_another_sequence_are_not_seen() -> None:
    target, request = static_target("llama"), Request(PROMPT, Ending(NUM_NEW_TOKENS))
    expected = plainly(target, request)
    plainly(target, Request(some_tokens(30, seed=1), Ending(30)))
    assert plainly(target, request) == expected


def test_outputs_are_the_callers_own() -> None:
    target = static_target("llama", "one width")
    cache, ids = target.new_cache(16), torch.tensor([some_tokens(12)])
    with torch.inference_mode():
        target.forward(ids[:, :8], cache, 0)
        tapped = TappedView(target, 2)
        first = tapped.run(ids[:, 8:10], cache, 8)
        assert first.states is not None
        kept = first.logits.clone(), first.states.clone()
        tapped.run(ids[:, 10:12], cache, 10)
    assert torch.equal(first.logits, kept[0])
    assert torch.equal(first.states, kept[1])
    assert first.states.shape[-2] == 2


def test_prepared_passes_are_dropped_with_their_view() -> None:
    target = Target(build("llama"), unwrapped())
    runner = target.runner
    assert isinstance(runner, StaticRunner)
    before = len(runner._prepared)
    write(target, SKIPS["mixed"], Fixed(max_tokens=3), Request(PROMPT, Ending(8)))
    gc.collect()
    assert len(runner._prepared) == before


# --- what cannot be run so --------------------------------------------------------------------------------------------


def test_family_with_custom_masks_is_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedRunnerError, match="BloomForCausalLM does not run with the runner 'static'"):
        Target(build("bloom"), unwrapped())


def test_attention_without_mask_support_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    anatomy = Target(model).anatomy
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    monkeypatch.setattr("decoding.target.target.examine", lambda model, config: anatomy)  # this kernel is not installed
    with pytest.raises(UnsupportedRunnerError, match="'flash_attention_2' does not support fixed-shape masks"):
        Target(model, "static")


def test_unknown_runner_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UnsupportedRunnerError, match="unknown runner 'fast'; valid: eager, static"):
        Target(build("llama"), "fast")


# --- compilation ------------------------------------------------------------------------------------------------------


def inductor() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by modules that it imports
        return importlib.import_module("torch._inductor.compile_fx")


class Counting:
    """Takes inductor's place: counts the graphs and runs them as they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_graphs = 0
        self.traces = False
        """True if graphs are traced as for inductor, which finds more of what they depend on."""
        monkeypatch.setattr(inductor(), "compile_fx", self._take)

    def _take(self, graph: torch.fx.GraphModule, inputs: list[Tensor], config_patches: object) -> Callable[..., Any]:
        self.num_graphs += 1
        return aot_eager(graph, inputs) if self.traces else graph.forward


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Counting:
    return Counting(monkeypatch)


def test_a_new_candidate_compiles_nothing(graphs: Counting) -> None:
    target = Target(build("llama"), "static")
    known = graphs.num_graphs
    assert known == 5, "one position, several, one without attention, one without MLP: for all layers; and the LM head"
    request = Request(PROMPT, Ending(NUM_NEW_TOKENS))
    expected = plain_text("llama", "several tokens")

    def check(skip: LayerSkip) -> None:
        generation = write(target, skip, Fixed(max_tokens=3), request)
        assert generation.tokens[: len(expected)] == expected

    for skip in (
        LayerSkip.blocks((2, 3)),
        LayerSkip(skip_attention=(1, 3), skip_mlp=(2,)),
        LayerSkip(skip_attention=(2,)),
        LayerSkip(skip_mlp=(1, 4)),
        LayerSkip(skip_attention=(4,), skip_mlp=(3,)),
    ):
        check(skip)
    with torch.inference_mode():
        for width in range(2, 40):  # including the number of heads, their size, the hidden size ...
            cache, ids = target.new_cache(50), torch.tensor([some_tokens(4 + width)])
            target.forward(ids[:, :4], cache, 0)
            target.forward(ids[:, 4:], cache, 4)
    longer = Request(some_tokens(40), Ending(90))
    assert plainly(target, longer) == plainly(Target(build("llama")), longer)
    assert graphs.num_graphs == known


def as_on_a_gpu() -> Target:
    """Compiled, with the shapes and masks of a GPU; replaying runs again."""
    return Target(build("llama"), functools.partial(StaticRunner, buckets=GPU_BUCKETS, recorder=CountingRecorder()))


def test_a_pass_over_a_whole_storage_compiles_nothing_of_its_own(graphs: Counting) -> None:
    graphs.traces = True
    target = as_on_a_gpu()
    known = graphs.num_graphs
    for length in (40, 500, 40):  # the third reads a third of the storage of the second
        plainly(target, Request(some_tokens(length), Ending(4)))
    assert graphs.num_graphs == known


def test_a_shared_pass_too_wide_to_be_recorded_may_be_compiled(
    monkeypatch: pytest.MonkeyPatch, graphs: Counting
) -> None:
    """Some attention kernels of a GPU need code of its own for a number of slots that is no multiple of 8 or 16."""
    target, seen = as_on_a_gpu(), set[tuple[bool, int]]()
    original = CompiledBlocks.__call__

    def watched(blocks: CompiledBlocks, block: nn.Module, states: Tensor, args: Any, kwargs: Any) -> Any:
        seen.add((blocks.is_new, kwargs["attention_mask"].shape[-1]))
        return original(blocks, block, states, args, kwargs)

    monkeypatch.setattr(CompiledBlocks, "__call__", watched)
    memory, widths = target.runner.new_cache(NUM_LAYERS, 150, num_rows=3).storage, (70, 77)
    asked = {}
    for row, width in enumerate(widths):
        cache = KVCache(NUM_LAYERS, 150, memory.row(row))
        ids = torch.tensor([some_tokens(9 + width)])
        with torch.inference_mode():
            target.runner.run(target.whole, ids[:, :9], cache, 0)
        asked[row] = PassRequest(ids[:, 9:], cache, 9, last_only=False, states=None)
    seen.clear()
    with torch.inference_mode():
        found = target.runner.run_shared_pass(target.whole, asked, memory)
    assert seen == {(True, 256)}
    for row, request in asked.items():
        cache = target_of("llama").new_cache(150)
        ids = torch.tensor([some_tokens(9 + widths[row])])
        with torch.inference_mode():
            expected = target_of("llama").forward(ids, cache, 0)
        torch.testing.assert_close(found[row].logits, expected[9:], msg=f"row {row}, {request.width} positions")


def test_block_that_cannot_be_compiled_runs_uncompiled_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object, config_patches: object) -> None:
        raise RuntimeError("no compiler on this machine")

    monkeypatch.setattr(inductor(), "compile_fx", broken)
    with pytest.warns(UserWarning, match=r"the layers run uncompiled, .*no compiler on this machine"):
        target = Target(build("llama"), "static")
    assert isinstance(target.runner.block_call, CompiledBlocks)
    assert target.runner.block_call.problem is not None
    assert plainly(target, Request(PROMPT, Ending(NUM_NEW_TOKENS))) == plain_text("llama", "several tokens")


# --- bit-exact mode ---------------------------------------------------------------------------------------------------


@functools.cache
def exact_target(family: str, dtype: torch.dtype) -> Target:
    return Target(build(family).to(dtype), functools.partial(StaticRunner, compiled=False, exact_width=8))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("gemma2", torch.bfloat16), ("qwen3", torch.float32)],
)
def test_logits_of_the_verification_have_the_bits_of_plain_decoding(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, request = exact_target(family, dtype), Request(PROMPT, Ending(40))
    seen: dict[tuple[int, ...], list[Tensor]] = {}
    honest = Target.run

    def run(self: Target, part: Part, token_ids: Tensor, cache: Any, start: int, **settings: Any) -> Outputs:
        outputs = honest(self, part, token_ids, cache, start, **settings)
        if start and part.is_whole:
            known = tuple(text.span(0, start)[0].tolist())
            for row, logits in enumerate(outputs.logits):
                position = len(token_ids[0]) - outputs.logits.shape[0] + row + 1
                seen.setdefault((*known, *token_ids[0, :position].tolist()), []).append(logits.clone())
        return outputs

    monkeypatch.setattr(Target, "run", run)
    texts = []
    for draft in (None, SKIPS["last block"], DRAFTS["lookup, then attention"]):
        steps = autoregressive(target, request)
        if draft is not None:
            drafter = build_drafter(target, draft, Decoding(prefix_reuse=False))
            assert drafter is not None
            steps = speculative(target, drafter, Fixed(max_tokens=12).controller(), request)
        with remembered(monkeypatch) as made:
            first = next(steps)
            text = made[-1]
            texts.append(Generation.collect([first, *steps]).tokens)
    assert texts[0] == texts[1] == texts[2]
    compared = [rows for rows in seen.values() if len(rows) > 1]
    assert len(compared) >= 39, "each token's logits in plain and in drafted decoding"
    assert all(torch.equal(row, rows[0]) for rows in compared for row in rows)


@contextmanager
def remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TokenSequence]]:
    """Collect the sequences that are started in the meantime."""
    made: list[TokenSequence] = []

    class Remembered(TokenSequence):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr("decoding.decode.TokenSequence", Remembered)
        yield made


def test_bit_exact_mode_bounds_a_draft_and_verifies_from_the_first_block() -> None:
    target = exact_target("llama", torch.float32)
    decoder = Decoder(target, SKIPS["last block"], Fixed(max_tokens=12))
    generation = decoder.generate(Request(PROMPT, Ending(40)))
    assert max(step.num_drafted for step in generation.rounds) == 7
    assert target.widest_pass(5) == 8


def test_ties_are_no_excuse_in_bit_exact_mode() -> None:
    target = exact_target("llama", torch.bfloat16)
    plain = plainly(target, Request(PROMPT, Ending(8)))
    other = (*plain[:4], (plain[4] + 1) % 96, *plain[5:])
    assert not compare(target, PROMPT, plain, other).is_lossless


def test_model_whose_bits_depend_on_the_position_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = StaticRunner.run

    def run(self: StaticRunner, part: Any, token_ids: Tensor, *args: Any, **settings: Any) -> Outputs:
        outputs = honest(self, part, token_ids, *args, **settings)
        return Outputs(outputs.logits * (1 + 1e-6 * torch.arange(outputs.logits.shape[0])[:, None]), outputs.states)

    monkeypatch.setattr(StaticRunner, "run", run)
    with pytest.raises(
        UnsupportedRunnerError, match="LlamaForCausalLM in float32 has no bit-exact mode on this device"
    ):
        Target(build("llama"), functools.partial(StaticRunner, compiled=False, exact_width=4))


def test_experts_that_group_rows_have_no_bit_exact_mode() -> None:
    with pytest.raises(UnsupportedRunnerError, match="MixtralForCausalLM in float32 has no bit-exact mode"):
        exact_target("mixtral", torch.float32)


def test_only_the_static_runner_has_bit_exact_mode() -> None:
    with pytest.raises(UnsupportedRunnerError, match="the runner 'eager' has no bit-exact mode: 'static' has"):
        Target(build("llama"), exact_width=4)


@pytest.mark.usefixtures("uncompiled")
def test_the_lm_head_of_one_position_is_called_as_the_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, tuple[int, ...]]] = []

    def watched(block: nn.Module, hidden_states: Tensor, args: Any, kwargs: Any) -> Any:
        called.append((type(block).__name__, tuple(hidden_states.shape)))
        return block(hidden_states, *args, **kwargs)

    monkeypatch.setattr("decoding.runners.static.call_block", watched)
    target = Target(build("llama"), "static")
    called.clear()
    assert plainly(target, Request(PROMPT, Ending(6))) == plain_text("llama", "several tokens")[:6]
    heads = [shape for name, shape in called if name in ("Linear", "FewPositionsLinear")]
    assert heads == [(1, 1, 32)] * 5, "except the prompt's, which runs eagerly"


def test_memory_made_in_inference_mode_serves_passes_outside_it() -> None:
    target = Target(build("llama"), functools.partial(StaticRunner, compiled=False))
    ids, expected = some_ids(12), []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            cache = target.new_cache(12)
            target.forward(ids[:, :6], cache, 0)
            expected.append(target.forward(ids[:, 6:9], cache, 6).clone())
        gc.collect()
    assert torch.equal(*expected)


def some_ids(length: int) -> Tensor:
    return torch.tensor([some_tokens(length)])
