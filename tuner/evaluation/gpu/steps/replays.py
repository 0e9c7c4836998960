"""Replays of recorded passes: on a tiny random model in float32, and on the widened model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import Draft, EarlyExit, LayerSkip, PromptLookup
from decoding.target import Target
from decoding.target.equivalence import find_shared_pass_difference
from decoding.text import Ending
from tuner.evaluation.gpu.contract import Result
from tuner.evaluation.gpu.passes import NUM_RUNS, compare_passes
from tuner.evaluation.gpu.shared import Shared

TINY_CONTEXTS, WIDE_CONTEXTS = (20, 300, 700), (64, 600)
TEXT_TOKENS = 24


class ReplayError(Exception):
    """Passes of the static runner differ from eager ones."""


@dataclass(frozen=True)
class TinyReplays:
    """Step: a tiny random model in float32, every shape, and whole texts of every kind of draft."""

    name: str = "replays-tiny"
    question: str = "Do replayed passes compute what eager passes do, in float32?"
    limit_seconds: float = 12
    pessimistic_seconds: float = 11

    def run(self, shared: Shared, seconds: float) -> Result:
        """Compare passes and texts. Raises `ReplayError` if one differs."""
        model = shared.tiny()
        static, eager = Target(model, "static"), Target(model)
        found = compare_passes(static, eager, TINY_CONTEXTS)
        texts, batches = _compare_texts(static, eager), find_shared_pass_difference(static)
        return refuse_differences({**found, "texts": texts, "batches": batches})

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the number of shapes and the worst difference."""
        yield _agreement(result)
        yield f"texts of {len(result['texts'])} drafts equal plain eager decoding"


@dataclass(frozen=True)
class WideReplays:
    """Step: the widened model in its own precision, every shape."""

    name: str = "replays-wide"
    question: str = "Do they on the widened model, and how long does it take to make it?"
    limit_seconds: float = 25
    pessimistic_seconds: float = 23

    def run(self, shared: Shared, seconds: float) -> Result:
        """Compare the logits of the trained tokens. Raises `ReplayError` if a pass differs."""
        trained = shared.source.config.vocab_size
        found = compare_passes(shared.static, shared.eager, WIDE_CONTEXTS, vocabulary=trained)
        batches = find_shared_pass_difference(shared.static)
        made = {"model": shared.description, "seconds": dict(shared.seconds)}
        return refuse_differences({**found, **made, "batches": batches})

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the model, the seconds that making it took, and the worst difference."""
        yield result["model"]
        yield ", ".join(f"{name} {seconds:.0f} s" for name, seconds in result["seconds"].items())
        yield _agreement(result)


@dataclass(frozen=True)
class ReplaysAgain:
    """Step: the shared recordings after many candidates, whose own recordings were destroyed."""

    name: str = "replays-again"
    question: str = "Do recordings still compute the same after other candidates' recordings were destroyed?"
    limit_seconds: float = 10
    pessimistic_seconds: float = 9

    def run(self, shared: Shared, seconds: float) -> Result:
        """Destroy the recordings of a few more candidates and compare again. Raises `ReplayError` if a pass differs."""
        request = Request(shared.prompts.tuning[0].token_ids, Ending(TEXT_TOKENS, shared.eos_token_ids))
        for boundary in range(1, 4):
            skip = LayerSkip.blocks((boundary,))
            Decoder(shared.static, skip, Fixed(max_tokens=2)).generate(request)
        trained = shared.source.config.vocab_size
        found = compare_passes(shared.static, shared.eager, WIDE_CONTEXTS[:1], vocabulary=trained)
        return refuse_differences({**found, "batches": find_shared_pass_difference(shared.static)})

    def lines(self, result: Mapping[str, Any]) -> Iterator[str]:
        """Yield the worst difference."""
        yield _agreement(result)


def refuse_differences(result: Result) -> Result:
    """Return the result; raise `ReplayError` that names what differs, if anything does."""
    wrong = [*result["differing"], *(name for name, same in result.get("texts", {}).items() if not same)]
    if result["batches"] is not None:
        wrong.append(result["batches"])
    if wrong:
        raise ReplayError(f"{len(wrong)} comparisons with eager passes fail: {'; '.join(wrong[:6])}")
    return result


def _compare_texts(static: Target, eager: Target) -> dict[str, bool]:
    """Return by draft whether it writes what plain eager decoding writes."""
    prompt = [token % static.config.vocab_size for token in range(5, 200, 3)] * 2
    request = Request(prompt, Ending(TEXT_TOKENS))
    expected = plain_decoder(eager).generate(request).tokens
    drafts: list[Draft] = [LayerSkip(skip_attention=(2, 4), skip_mlp=(3,)), EarlyExit(exit_layer=2), PromptLookup()]
    decoders = {"plain": plain_decoder(static)}
    for draft in drafts:
        decoders[draft.describe()] = Decoder(static, draft, Fixed(max_tokens=6))
        decoders[f"{draft.describe()}, looking"] = Decoder(static, draft, TopProbability(max_tokens=6))
    return {name: decoder.generate(request).tokens == expected for name, decoder in decoders.items()}


def _agreement(result: Mapping[str, Any]) -> str:
    return f"{result['shapes']} shapes x {NUM_RUNS} runs agree: {result['worst']:.1e} at most ({result['tolerance']:.0e} allowed)"
