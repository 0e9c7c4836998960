"""Every draft as a tree of Optuna parameters: its kind, and the parts that drafts of the kind may have.

A search that knows nothing of language models can so choose among all that `joint` may choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from optuna.trial import BaseTrial, FixedTrial

from decoding.drafts import (
    BitWidth,
    CandidateTree,
    Draft,
    EarlyExit,
    FirstLookup,
    FixedLeaves,
    LayerSkip,
    Lookup,
    PromptLookup,
    PublishedLeaves,
    SizedLeaves,
    SuffixDraft,
    SuffixLookup,
)
from decoding.target import Target
from studies.contract import Problem
from studies.draft_space import CHAIN, NOTHING_BEFORE, OWN_WEIGHTS
from studies.switches import Switches, odd_blocks

LONGEST_NGRAM, SHORTEST_NGRAM, MATCH, COPIED = (1, 5), (1, 3), (1, 4), (1, 16)
"""Ranges of the lookups: n-grams, shortest matches, and tokens to copy before another draft."""
FACTORS, LEAST_PROBABILITIES = (1.0, 64.0), (0.0, 0.9)
"""Ranges of the suffix automaton: tokens to copy per token of the match, and least estimated probability."""
LEAVES, GAINS = (1, 4), (0.005, 0.5)
"""Ranges of the side leaves: leaves at each depth, and expected tokens that a leaf has to add."""

Parameters = dict[str, Any]


class AnyDraft:
    """The drafts of a problem: skip sets, exits, trained heads, copies, and their precisions, lookups and side leaves."""

    def __init__(
        self, problem: Problem, heads: Sequence[EarlyExit], bits: Sequence[BitWidth], *, trees: bool, whole_blocks: bool
    ) -> None:
        """Offer what the model can run and the problem accepts.

        `heads` are the exits with a head, ordered by exit; `bits` the precisions beside the model's own. `trees` offers side
        leaves; `whole_blocks` offers no skips of single sublayers.
        """
        target = problem.target
        self._num_layers, self._heads, self._feature = target.num_layers, heads, problem.feature_draft
        named = {f"int{each}": each for each in bits} if target.can_be_quantised else {}
        self._bits: dict[str, BitWidth | None] = {OWN_WEIGHTS: None, **named}
        self._sets = _SkipSets(target, whole_blocks=whole_blocks)
        # An engine that the search deploys to does not run every draft.
        usual = [(start, self._of_kind(FixedTrial(start), start["kind"])) for start in self._usual()]
        usual = [(start, draft) for start, draft in usual if problem.accepts(draft)]
        takes_lookups = any(draft.takes_lookup and problem.accepts(draft.with_lookup(Lookup())) for _, draft in usual)
        self._lookups = (NOTHING_BEFORE, *(LOOKUPS if takes_lookups else ()))
        self._trees = (CHAIN, *(TREES if trees and target.takes_trees else ()))
        self.starts: list[Parameters] = [{**start, "lookup": NOTHING_BEFORE, "tree": CHAIN} for start, _ in usual]
        """Usual drafts of each kind, alone and as chains, as parameters."""
        self.kinds = tuple(dict.fromkeys(start["kind"] for start, _ in usual))
        """The kinds that are offered."""

    def draft(self, trial: BaseTrial) -> Draft:
        """Return the draft that the trial suggests."""
        draft = self._of_kind(trial, trial.suggest_categorical("kind", self.kinds))
        if draft.takes_lookup:
            before = trial.suggest_categorical("lookup", self._lookups)
            draft = draft if before == NOTHING_BEFORE else draft.with_lookup(LOOKUPS[before](trial))
        if draft.takes_tree:
            shape = trial.suggest_categorical("tree", self._trees)
            draft = draft if shape == CHAIN else draft.with_tree(TREES[shape](trial))
        return draft

    def _of_kind(self, trial: BaseTrial, kind: str) -> Draft:
        """Return the suggested draft of a kind, in its precision, alone and as a chain."""
        draft = self._whole(trial, kind)
        return (
            draft.with_bits(self._bits[trial.suggest_categorical("bits", list(self._bits))])
            if draft.takes_bits
            else draft
        )

    def _whole(self, trial: BaseTrial, kind: str) -> Draft:
        """Return the suggested draft of a kind with the model's own weights."""
        match kind:
            case "skip set":
                return self._sets.draft(trial)
            case "exit":
                return EarlyExit(exit_layer=trial.suggest_int("exit", 1, self._num_layers - 1))
            case "exit with head":
                return self._heads[trial.suggest_int("head", 0, len(self._heads) - 1)]
            case "prompt lookup":
                return PromptLookup(**_ngrams(trial))
            case "suffix automaton":
                return SuffixDraft(**_match(trial))
        assert self._feature is not None, "a feature head is offered if there is one"
        return self._feature

    def _usual(self) -> Iterator[Parameters]:
        """Yield usual drafts: odd blocks, the whole model in each lower precision, the exits in the middle, lookups."""
        own = {"bits": OWN_WEIGHTS}
        if self._sets.names:
            yield {"kind": "skip set", **own, **self._sets.odd}
            for bits in self._bits:
                if bits != OWN_WEIGHTS:
                    yield {"kind": "skip set", "bits": bits, **dict.fromkeys(self._sets.names, False)}
        if self._num_layers > 1:
            yield {"kind": "exit", **own, "exit": self._num_layers // 2}
        if self._heads:
            yield {"kind": "exit with head", **own, "head": len(self._heads) // 2}
        if self._feature is not None:
            yield {"kind": "feature head"}
        yield {"kind": "prompt lookup", "lookup.max_ngram": 3, "lookup.min_ngram": 1}
        match = {"lookup.min_match": 1, "lookup.max_spec_factor": 2.0, "lookup.min_token_prob": 0.3}
        yield {"kind": "suffix automaton", **match}


class _SkipSets:
    """Skip sets as switches of the middle blocks: one for each block, or for each of its sublayers."""

    def __init__(self, target: Target, *, whole_blocks: bool) -> None:
        self._switches = Switches.of_middle_blocks(target.num_layers)
        self._by_block = whole_blocks or None in (*target.anatomy.attention, *target.anatomy.mlp)
        blocks = self._switches.blocks
        self.names = [f"block.{block}" for block in blocks] if self._by_block else self._switches.names
        odd = self._switches.point(odd_blocks(target.num_layers)) > 0.5 if self.names else np.zeros(0, dtype=bool)
        self.odd = dict(zip(self.names, odd[: len(self.names)].tolist(), strict=True))

    def draft(self, trial: BaseTrial) -> LayerSkip:
        """Return the set that the trial suggests, switch by switch."""
        point = np.array([trial.suggest_categorical(name, [False, True]) for name in self.names], dtype=float)
        return self._switches.draft(np.tile(point, 2) if self._by_block else point)


def _ngrams(trial: BaseTrial) -> dict[str, int]:
    fewest = trial.suggest_int("lookup.min_ngram", *SHORTEST_NGRAM)
    return {"max_ngram": max(fewest, trial.suggest_int("lookup.max_ngram", *LONGEST_NGRAM)), "min_ngram": fewest}


def _match(trial: BaseTrial) -> Parameters:
    return {
        "min_match": trial.suggest_int("lookup.min_match", *MATCH),
        "max_spec_factor": trial.suggest_float("lookup.max_spec_factor", *FACTORS, log=True),
        "min_token_prob": trial.suggest_float("lookup.min_token_prob", *LEAST_PROBABILITIES),
    }


def _copied(trial: BaseTrial) -> int:
    return trial.suggest_int("lookup.max_tokens", *COPIED)


LOOKUPS: Mapping[str, Callable[[BaseTrial], FirstLookup]] = MappingProxyType(
    {
        Lookup.method_name: lambda trial: Lookup(**_ngrams(trial), max_tokens=_copied(trial)),
        SuffixLookup.method_name: lambda trial: SuffixLookup(**_match(trial), max_tokens=_copied(trial)),
    }
)
"""The lookups before another draft, by the name of their method."""
TREES: Mapping[str, Callable[[BaseTrial], CandidateTree]] = MappingProxyType(
    {
        "fixed": lambda trial: FixedLeaves(leaves=trial.suggest_int("tree.leaves", *LEAVES)),
        "published": lambda trial: PublishedLeaves(),
        "sized": lambda trial: SizedLeaves(least_gain=trial.suggest_float("tree.least_gain", *GAINS, log=True)),
    }
)
"""The side leaves, by the shape of their tree."""
