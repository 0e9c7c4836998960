"""Memory of a search, estimated before any weights are read (our formulation)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from rich.console import Group, RenderableType
from rich.text import Text

from decoding.cache.rounds_cache import MemoryLimits
from decoding.drafts import BitWidth
from decoding.head_folder import MAX_LOADED
from studies.prediction.survey import DEPTH
from tuner.config import SearchConfig
from tuner.heads.limits import bytes_per_head, heads_that_fit, shared_bytes
from tuner.inputs.memory import USABLE, ModelSize, free_bytes, gigabytes, refuse_too_large, size_of_checkpoint
from tuner.inputs.models import resolve_device
from tuner.measuring.baseline import most_known_bytes
from tuner.tables import facts_grid

PROMPT_TOKENS = 1024
"""Tokens of a prompt where nothing else is known."""
BYTES_PER_WEIGHT: Mapping[BitWidth, float] = {8: 1.02, 4: 0.62}
"""Bytes of a quantised weight with its share of the scales (`decoding.kernels.quantised`)."""
NUM_CACHES = 2
"""Caches at a time: plain decoding's and the candidate's."""


@dataclass(frozen=True)
class MemoryPlan:
    """Estimated bytes of a search on a device, as far as its settings say; all heads that its studies want count as missing."""

    size: ModelSize
    config: SearchConfig
    free: int | None
    """Free memory of the device; None if it is unknown."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.config.max_prompt_tokens or PROMPT_TOKENS

    @cached_property
    def num_surveyed(self) -> int:
        """Sequences that drafts are predicted on; 0 without predictions."""
        return max(_num_surveyed(self.config.study_settings(name), self.config) for name in self.config.study)

    @cached_property
    def num_distilled(self) -> int:
        """Exit heads to distil."""
        settings = [self.config.study_settings(name) for name in self.config.study]
        wanted = {layer for each in settings for layer in each.wanted_heads(self.size.num_layers)}
        return len(wanted) if self.config.distill == "auto" else 0

    @cached_property
    def bits(self) -> tuple[BitWidth, ...]:
        """Precisions of quantised drafts, whose weights are copies beside the model's."""
        return self.config.wanted_bits(resolve_device(self.config.device))

    @property
    def cache(self) -> int:
        """Bytes of the key-value caches of decoding."""
        return NUM_CACHES * self.config.batch_size * self._context * self.size.cache_bytes

    @property
    def known(self) -> int:
        """Most bytes of what stays known of the tuning prompts and of the held-out ones."""
        most = most_known_bytes(resolve_device(self.config.device).type, self.size.weight_bytes)
        numbers = self.config.tuning_prompts, self.config.held_out_prompts
        return sum(min(most, number * self.prompt_tokens * self.size.cache_bytes) for number in numbers)

    @property
    def heads(self) -> int:
        """Bytes of the exit heads that are loaded at a time."""
        return min(self.num_distilled, MAX_LOADED) * self.size.block_parameters * self.size.dtype.itemsize

    @property
    def quantised(self) -> int:
        """Most bytes of quantised weights: all blocks and the LM head in every precision at a time, as costs are measured.

        On a CPU there is an LM head in int8 for greedy passes, too.
        """
        size, of_drafts = self.size, sum(BYTES_PER_WEIGHT[bits] for bits in self.bits)
        of_greedy = BYTES_PER_WEIGHT[8] if resolve_device(self.config.device).type == "cpu" else 0
        lm_head = size.vocabulary * size.hidden_size
        return round(size.num_layers * size.block_parameters * of_drafts + lm_head * (of_drafts + of_greedy))

    @property
    def survey(self) -> int:
        """Most bytes of the surveys: contexts, states of exits, and distributions in float32."""
        size, new_tokens, limits = self.size, self.config.max_new_tokens, MemoryLimits.beside(self.size.weight_bytes)
        num_rounds = self.num_surveyed * -(-new_tokens // DEPTH)
        rows = num_rounds * (self._context + DEPTH) * size.cache_bytes
        if rows > limits.kept:
            contexts = self.num_surveyed * self._context * size.cache_bytes
            rows = contexts + min(limits.gathered, rows // size.num_layers)
        num_states = (size.num_layers - 1) * self.num_surveyed * self._context
        states = min(limits.kept, num_states * size.hidden_size * size.dtype.itemsize)
        kept_and_drafted = self.num_surveyed * new_tokens * size.vocabulary * (4 + size.dtype.itemsize)
        compared = 3 * new_tokens * size.vocabulary * 4
        return (rows + states + kept_and_drafted + compared) if num_rounds else 0

    @property
    def heads_at_once(self) -> int:
        """Heads that are distilled at a time."""
        settings = self.config.distillation
        free = None if self.free is None else max(0, self.free - self.size.weight_bytes)
        fit = settings.heads_at_once or heads_that_fit(self.size, self.prompt_tokens, settings, free)
        return min(self.num_distilled, fit or self.num_distilled)

    @property
    def distillation(self) -> int:
        """Bytes of distilling as many heads as fit at a time."""
        arguments = self.size, self.prompt_tokens, self.config.distillation
        return self.heads_at_once * bytes_per_head(*arguments) + shared_bytes(*arguments) if self.heads_at_once else 0

    @property
    def total(self) -> int:
        """Most bytes at a time: the weights, and either distillation or decoding with surveys."""
        return self.size.weight_bytes + max(self.distillation, self._decoding)

    @property
    def _decoding(self) -> int:
        return self.cache + self.known + self.heads + self.quantised + self.survey

    @property
    def _context(self) -> int:
        return self.prompt_tokens + self.config.max_new_tokens

    def verdict(self) -> str:
        """Return whether the search fits, in a few words."""
        if self.free is None:
            return "unknown: the free memory of this device cannot be read"
        if self.size.weight_bytes > self.free:
            return "the weights do not fit"
        if self.total > self.free:
            return (
                "the weights fit, but not all of the work: lower the batch size, or shorten prompts and continuations"
            )
        return "fits" if self.total <= USABLE * self.free else "fits narrowly"

    def refuse_too_large(self, name: str) -> None:
        """Raise `MemoryShortageError` if the weights of the model `name` alone exceed the free memory."""
        refuse_too_large(self.size, self.free, name)


def plan_memory(config: SearchConfig) -> MemoryPlan:
    """Return the plan of a search; reads the model's config.json only."""
    size = size_of_checkpoint(config.model, revision=config.revision, dtype=config.dtype, device=config.device)
    return MemoryPlan(size, config, free_bytes(config.device))


def memory_table(plan: MemoryPlan) -> RenderableType:
    """Return a table of the estimate."""
    grid = facts_grid()
    for name, amount, note in _rows(plan):
        grid.add_row(name, f"{gigabytes(amount):>10}   {note}")
    free = "unknown" if plan.free is None else gigabytes(plan.free)
    grid.add_row("at most", f"{gigabytes(plan.total):>10}   of {free} free on the device: {plan.verdict()}")
    return Group(Text("memory (estimate, before weights are read)"), grid)


def _rows(plan: MemoryPlan) -> Iterator[tuple[str, int, str]]:
    """Yield the name, bytes and note of each part that takes memory."""
    size, config = plan.size, plan.config
    precision = str(size.dtype).removeprefix("torch.")
    yield "weights", size.weight_bytes, f"{size.num_parameters:,} parameters in {precision}"
    context = f"{plan.prompt_tokens} + {config.max_new_tokens} tokens"
    yield "cache", plan.cache, f"{NUM_CACHES} x {config.batch_size} sequences of {context}"
    if plan.known:
        yield "known prompts", plan.known, "what the model knows of tuning and held-out prompts, which it reads once"
    if plan.heads:
        yield (
            "exit heads",
            plan.heads,
            f"{min(plan.num_distilled, MAX_LOADED)} of {plan.num_distilled} loaded at a time",
        )
    if plan.quantised:
        precisions = " and ".join(f"int{bits}" for bits in plan.bits) or "int8"
        copied = "the blocks' weights and the LM head" if plan.bits else "the LM head"
        yield "quantised weights", plan.quantised, f"copies of {copied} in {precisions}"
    if plan.survey:
        yield "surveys", plan.survey, f"up to {plan.num_surveyed} sequences"
    if plan.distillation:
        note = f"{plan.num_distilled} heads, {plan.heads_at_once} at a time; not together with cache and surveys"
        yield "distillation", plan.distillation, note


def _num_surveyed(settings: object, config: SearchConfig) -> int:
    """Return the most sequences that a study surveys: as many as its tokens ask for, in whole batches, or all."""
    num_tokens = getattr(settings, "pool_tokens", None)
    if num_tokens is None:
        return config.tuning_prompts
    per_batch = config.batch_size * config.max_new_tokens
    return min(config.tuning_prompts, config.batch_size * (num_tokens // per_batch + 1))
