"""Steps on the machine, compilation, and replays: do recorded passes compute what eager passes do?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.shared import Shared
from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import Draft, EarlyExit, LayerSkip, PromptLookup
from decoding.runners.static import CHAINS
from decoding.target import DraftView, Target
from decoding.target.equivalence import find_shared_pass_difference
from decoding.text import Ending
from decoding.timing.passes import Stopwatch
from tuner.results import device_name, versions

PACKAGES = ("triton", "numpy", "safetensors", "tokenizers", "mlflow", "datasets", "greenlet")
SKIP = LayerSkip(skip_attention=(1,), skip_mlp=(2,))
"""A draft with both kinds of partial blocks."""
WIDTHS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 65)
NUM_RUNS = 3
"""Runs of each shape: the first one prepares, the others replay."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.08}
"""Largest difference of two computations of the same logits, relative to the largest logit: as `check_runner` allows."""
TINY_CONTEXTS, WIDE_CONTEXTS = (20, 300, 700), (64, 600)
TEXT_TOKENS = 24


class ReplayError(Exception):
    """Passes of the static runner differ from eager ones."""


def environment(shared: Shared, seconds: float) -> dict[str, Any]:
    """Collect device, versions, free memory, attention backends, and the tools that compilation needs."""
    backends = torch.backends.cuda
    found: dict[str, Any] = {"device": device_name(shared.device), **versions()}
    installed = {each.metadata["Name"] for each in metadata.distributions()}
    found |= {name: metadata.version(name) if name in installed else "missing" for name in PACKAGES}
    found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "cpus": os.cpu_count()}
    found["attention"] = {
        name: getattr(backends, f"{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "math", "cudnn")
    }
    found["compilers"] = {name: shutil.which(name) is not None for name in ("gcc", "g++", "cc", "nvcc")}
    if shared.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(shared.device)
        facts = torch.cuda.get_device_properties(shared.device)
        found |= {"free GiB": free / 2**30, "total GiB": total / 2**30, "multiprocessors": facts.multi_processor_count}
        found["capability"] = f"{facts.major}.{facts.minor}"
    return {"rows": [{"fact": name, "value": value} for name, value in found.items()]}


def compilation(shared: Shared, seconds: float) -> dict[str, Any]:
    """Compile each kind of block on one position, on several, and for several sequences, so that no later step waits."""

    def decode(target: Target) -> None:
        request = Request(range(5, 25), Ending(8))
        for decoder in (plain_decoder(target), Decoder(target, SKIP, Fixed(max_tokens=2))):
            decoder.generate(request)
            decoder.generate_batch([request] * 2)

    watch = Stopwatch(shared.device)
    made = {"widened model": watch.time(lambda: decode(shared.static)), **shared.seconds}
    return {"rows": [{"compiled or made": name, "s": each} for name, each in made.items()]}


def tiny_replays(shared: Shared, seconds: float) -> dict[str, Any]:
    """Compare a tiny float32 model's passes of every shape, and whole texts of several drafts. Raises `ReplayError`."""
    model = shared.tiny()
    static, eager = Target(model, "static"), Target(model)
    prompt = [token % static.config.vocab_size for token in range(5, 200, 3)] * 2
    request = Request(prompt, Ending(TEXT_TOKENS))
    expected = plain_decoder(eager).generate(request).tokens
    drafts: list[Draft] = [LayerSkip(skip_attention=(2, 4), skip_mlp=(3,)), EarlyExit(exit_layer=2), PromptLookup()]
    decoders = {"plain": plain_decoder(static)}
    for draft in drafts:
        decoders[draft.describe()] = Decoder(static, draft, Fixed(max_tokens=6))
        decoders[f"{draft.describe()}, looking"] = Decoder(static, draft, TopProbability(max_tokens=6))
    wrong = [name for name, decoder in decoders.items() if decoder.generate(request).tokens != expected]
    return compare_passes(static, eager, TINY_CONTEXTS, also_wrong=wrong)


def wide_replays(shared: Shared, seconds: float) -> dict[str, Any]:
    """Compare the widened model's passes of every shape, by the logits of the trained tokens. Raises `ReplayError`."""
    return compare_passes(shared.static, shared.eager, WIDE_CONTEXTS, vocabulary=shared.source.config.vocab_size)


def replays_again(shared: Shared, seconds: float) -> dict[str, Any]:
    """Destroy the recordings of a few more candidates, then compare the shared ones again. Raises `ReplayError`."""
    request = Request(shared.prompts.tuning[0].token_ids, Ending(TEXT_TOKENS, shared.eos_token_ids))
    for boundary in range(1, 4):
        Decoder(shared.static, LayerSkip.blocks((boundary,)), Fixed(max_tokens=2)).generate(request)
    return compare_passes(shared.static, shared.eager, WIDE_CONTEXTS[:1], vocabulary=shared.source.config.vocab_size)


@torch.inference_mode()
def compare_passes(
    static: Target,
    eager: Target,
    contexts: tuple[int, ...],
    *,
    vocabulary: int | None = None,
    also_wrong: list[str] | None = None,
) -> dict[str, Any]:
    """Compare logits of the first `vocabulary` tokens over all widths and contexts, drafts of a view, and shared passes.

    Raises `ReplayError` that names what differs, `also_wrong` included.
    """
    tolerance, worst, wrong, num_shapes = TOLERANCES[static.dtype], 0.0, list(also_wrong or ()), 0
    for context in contexts:
        for name, differences in _differences(static, eager, context, vocabulary):
            num_shapes += 1
            worst = max(worst, *differences)
            if max(differences) > tolerance:
                wrong.append(f"{name} after {context} tokens ({', '.join(f'{each:.2g}' for each in differences)})")
    if (shared_passes := find_shared_pass_difference(static)) is not None:
        wrong.append(shared_passes)
    if wrong:
        raise ReplayError(f"{len(wrong)} comparisons with eager passes fail: {'; '.join(wrong[:6])}")
    return {"rows": [{"shapes": num_shapes, "runs": NUM_RUNS, "largest difference": worst, "allowed": tolerance}]}


def _differences(
    static: Target, eager: Target, context: int, vocabulary: int | None
) -> Iterator[tuple[str, list[float]]]:
    """Yield the differences of each shape in `NUM_RUNS` runs, each at another position on other tokens."""
    stream = torch.Generator().manual_seed(context)
    length = context + max(WIDTHS) + NUM_RUNS
    ids = torch.randint(static.config.vocab_size, (1, length), generator=stream).to(static.device)
    caches = [target.new_cache(length) for target in (static, eager)]
    for target, cache in zip((static, eager), caches, strict=True):
        target.forward(ids, cache, 0)

    def difference(found: Tensor, expected: Tensor) -> float:
        found, expected = (each[..., :vocabulary].float() for each in (found, expected))
        if not bool(torch.isfinite(found).all()):
            return float("inf")
        return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))

    def whole(start: int, width: int, last_only: bool) -> float:
        given = ids[:, start : start + width]
        return difference(
            static.forward(given, caches[0], start, last_only=last_only),
            eager.forward(given, caches[1], start, last_only=last_only),
        )

    def step(start: int) -> float:
        given = ids[:, start : start + 1]
        return difference(*(view.run(given, cache, start).logits for view, cache in zip(views, caches, strict=True)))

    def chain(start: int, count: int) -> float:
        """Return the largest logit that a drafted token gave away to the best one, relative to the largest."""
        first, worst = ids[:, start : start + 1], 0.0
        drafted = views[0].write(first, caches[0], start, count).token_ids
        given = torch.cat([first[0], drafted])
        for index, token in enumerate(drafted.tolist()):
            (logits,) = views[1].run(given[index : index + 1][None], caches[1], start + index).logits.float()
            worst = max(worst, float((logits.max() - logits[token]) / logits.abs().max().clamp_min(1e-6)))
        return worst

    starts = range(context, context + NUM_RUNS)
    for last_only in (False, True):
        for width in WIDTHS:
            name = f"{'last of ' if last_only else ''}{width} positions"
            yield name, [whole(start, width, last_only) for start in starts]
    views = [DraftView(target, [1], [2], keep_boundary=False) for target in (static, eager)]
    yield "draft step", [step(start) for start in starts]
    for count in CHAINS:
        yield f"chain of {count}", [chain(start, count) for start in starts]
