"""The space of a search: every draft and rule that model, heads, device and settings allow, as Optuna parameters.

It never depends on measurements: all trials and processes of a search share one space, and Optuna refuses a parameter whose values
change. Predictions decide what is tried first. `Space.suggest` asks a trial for a candidate part by part; `Space.parameters` is its
inverse, for a study that has chosen a candidate and for candidates that are known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from optuna.trial import BaseTrial, FixedTrial
from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.draft_length import RULES, Fixed
from decoding.drafts import (
    BitWidth,
    Draft,
    DraftDocument,
    EarlyExit,
    Layers,
    LayerSkip,
    Lookup,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from decoding.drafts.lookup import LONGEST_NGRAM, MOST_COPIED
from decoding.kernels.choice import check_quantised, kernel_for
from decoding.target import Target
from studies.contract import Candidate, Problem, StudySettings
from studies.rule_space import DEFAULT_RULES, RuleNames, rule_parameters, rules_within, search_ranges, suggest_rule

Parameters = dict[str, Any]

OWN_WEIGHTS, NOTHING_BEFORE, ALL_IDS = "model's own", "none", "all"
"""The values of `bits`, `lookup` and `ids_below` for a draft without these."""
NO_HEAD, TRAINED_HEAD = "no head", "trained head"
"""The values of `head`, which is asked for where an exit may have one or not."""
PLAIN, SKIP_SET, EXIT = "none", "layer_skip", "early_exit"
"""Kinds of drafts, as `decoding.drafts.KINDS` names them."""

COPIES: Mapping[str, type[DraftDocument]] = MappingProxyType(
    {"prompt_lookup": PromptLookup, "suffix_automaton": SuffixDraft}
)
LOOKUPS: Mapping[str, type[Lookup | SuffixLookup]] = MappingProxyType(
    {each.method_name: each for each in (Lookup, SuffixLookup)}
)
FREQUENT_IDS = 2**14
"""Token ids that a quantised draft of a model with at least twice as many may keep to, with those of the text. Of the tokens that
SmolLM2-135M wrote after 28 questions, 94.4 % have such an id, and 98.5 % have one or stood in the text before."""

RANGES: Mapping[str, tuple[float, float, bool]] = MappingProxyType(
    {
        "max_ngram": (1, LONGEST_NGRAM, True),
        "min_ngram": (1, LONGEST_NGRAM, True),
        "direct_from": (1, LONGEST_NGRAM, True),
        "min_match": (1, LONGEST_NGRAM, True),
        "max_tokens": (1, MOST_COPIED, True),
        "max_spec_factor": (0.25, 64.0, True),
        "min_token_prob": (0.0, 1.0, False),
    }
)
"""Lowest and highest value of the settings of lookups, and whether they are searched on a logarithmic scale: what the
documents allow, so that a candidate of any origin has its place. Whole numbers are those whose bounds are."""


SkipSet = frozenset[int]
"""Indices of the skipped items in `SkipSpace.items`."""


@dataclass(frozen=True)
class SkipSpace:
    """The items of a model: single sublayers where a block has both as modules, else whole blocks."""

    items: tuple[LayerSkip, ...]

    @classmethod
    def of(cls, target: Target, *, whole_blocks: bool = False) -> SkipSpace:
        """Return all items of a model, from the first block to the last; with `whole_blocks`, blocks only."""
        items: list[LayerSkip] = []
        for index, parts in enumerate(zip(target.anatomy.attention, target.anatomy.mlp, strict=True)):
            if whole_blocks or None in parts:
                items.append(LayerSkip.blocks((index,)))
            else:
                items += [LayerSkip(skip_attention=(index,)), LayerSkip(skip_mlp=(index,))]
        return cls(tuple(items))

    @property
    def names(self) -> list[str]:
        """Name of each item, as a switch."""
        return [
            f"block.{item.first_skipped}"
            if item.skip_attention == item.skip_mlp
            else f"{'attention' if item.skip_attention else 'mlp'}.{item.first_skipped}"
            for item in self.items
        ]

    def draft(self, chosen: Iterable[int]) -> LayerSkip:
        """Return the draft that skips the items at these indices."""
        items = [self.items[index] for index in sorted(chosen)]
        return LayerSkip(
            skip_attention=tuple(index for item in items for index in item.skip_attention),
            skip_mlp=tuple(index for item in items for index in item.skip_mlp),
        )

    def neighbours(self, one: int, other: int) -> bool:
        """Return whether two items skip the same kind of sublayer in adjacent blocks."""
        parts = [(item.skip_attention, item.skip_mlp) for item in (self.items[one], self.items[other])]
        return any(
            abs(index - beside) == 1 for kind in zip(*parts, strict=True) for index in kind[0] for beside in kind[1]
        )

    def chosen(self, draft: LayerSkip) -> SkipSet:
        """Return the indices of the skipped items. Raises ValueError for a draft that skips a part of an item."""
        chosen = frozenset(
            index
            for index, item in enumerate(self.items)
            if set(item.skip_attention) <= set(draft.skip_attention) and set(item.skip_mlp) <= set(draft.skip_mlp)
        )
        if self.draft(chosen) != LayerSkip(
            skip_attention=tuple(sorted(draft.skip_attention)), skip_mlp=tuple(sorted(draft.skip_mlp))
        ):
            raise ValueError(f"{draft.describe()} skips only parts of the items of this model")
        return chosen


class Space:
    """The candidates of one search: plain decoding, and the drafts that are offered, each with a rule."""

    def __init__(
        self,
        target: Target,
        *,
        rules: Sequence[str],
        max_tokens: int,
        skips: SkipSpace | None = None,
        exits: Iterable[EarlyExit] = (),
        copies: bool = False,
        bits: Sequence[BitWidth] = (),
        accepts: Callable[[DraftDocument], bool] = lambda draft: True,
    ) -> None:
        """Offer skip sets of the items in `skips`, these exits, and copies (alone, and before other drafts).

        `bits` are precisions beside the model's own. `accepts` says whether a draft may be proposed.
        """
        self._num_layers = target.num_layers
        self._skips = skips
        self._rules, self._max_tokens = rules, max_tokens
        self._exits: dict[int, dict[str, EarlyExit]] = {}
        for draft in sorted(exits, key=lambda draft: (draft.exit_layer, draft.trained_head is not None)):
            self._exits.setdefault(draft.exit_layer, {})[TRAINED_HEAD if draft.trained_head else NO_HEAD] = draft
        named = {f"int{each}": each for each in bits} if target.can_be_quantised else {}
        self._bits: dict[str, BitWidth | None] = {OWN_WEIGHTS: None, **named}
        # An engine may run some copies and not others: of each kind the first that it accepts speaks for it.
        copied = [next(filter(accepts, _variants(document)), None) for document in COPIES.values()] if copies else []
        alone: list[Draft] = [*filter(accepts, self._usual()), *(draft for draft in copied if draft is not None)]
        self.usual: Sequence[Draft] = tuple(alone)
        """A few drafts of each kind, with which to begin where nothing is predicted."""
        single = [skips.draft((item,)) for item in range(len(skips.items))] if skips else []
        offered = [
            *alone,
            *filter(accepts, [*single, *(draft for group in self._exits.values() for draft in group.values())]),
        ]
        self.kinds = (PLAIN, *dict.fromkeys(draft.kind for draft in offered))
        before = [name for name in LOOKUPS if copies and _any_takes(offered, LOOKUPS[name], accepts)]
        self._lookups = (NOTHING_BEFORE, *before)
        below = frequent_ids(target)
        fewer = [LayerSkip(bits=each, ids_below=below) for each in named.values() if below]
        self._ids_below: dict[str, int | None] = {
            ALL_IDS: None,
            **({str(below): below} if any(map(accepts, fewer)) else {}),
        }

    def suggest(self, trial: BaseTrial) -> Candidate:
        """Return the candidate that the trial suggests, part by part."""
        draft = self.draft(trial)
        rule = suggest_rule(trial, self._rules, self._max_tokens) if draft.drafts else Fixed()
        return Candidate(draft=draft, draft_length=rule)

    def draft(self, trial: BaseTrial) -> Draft:
        """Return the draft that the trial suggests."""
        kind = trial.suggest_categorical("kind", self.kinds)
        if kind == PLAIN:
            return PlainDecoding()
        draft = self._of_kind(trial, kind)
        if "bits" in draft.takes:
            draft = draft.having(bits=self._bits[trial.suggest_categorical("bits", tuple(self._bits))])
        if "ids_below" in draft.takes and draft.parts.bits and len(self._ids_below) > 1:
            chosen = trial.suggest_categorical("ids_below", tuple(self._ids_below))
            draft = draft.having(ids_below=self._ids_below[chosen])
        if "lookup" in draft.takes:
            name = trial.suggest_categorical("lookup", self._lookups)
            draft = draft if name == NOTHING_BEFORE else draft.having(lookup=_suggest(trial, "lookup", LOOKUPS[name]))
        return draft

    def parameters(self, candidate: Candidate) -> Parameters:
        """Return the parameters with which `suggest` returns the candidate, its rule clipped to the ranges that are searched.

        Raises ValueError for a candidate that the space does not hold.
        """
        draft, rule = candidate.draft, candidate.draft_length
        found = self.draft_parameters(draft)
        if not draft.drafts:
            return found
        if rule.rule not in self._rules:
            raise ValueError(f"the search does not consider the rule {rule.rule}, only {', '.join(self._rules)}")
        return found | rule_parameters(rule, self._max_tokens)

    def draft_parameters(self, draft: Draft) -> Parameters:
        """Return the parameters with which `draft` returns this draft. Raises ValueError for one that the space does not hold."""
        try:
            found = self._draft_parameters(draft)
            if self.draft(FixedTrial(found)) != draft:
                raise ValueError("no parameters lead to it")
        except ValueError as cause:
            raise ValueError(f"the search does not consider the draft {draft.describe()!r}: {cause}") from None
        return found

    def starts(self) -> list[Parameters]:
        """Return the usual drafts, each with the defaults of the first rule, as parameters."""
        rule = RULES[self._rules[0]](rule=self._rules[0])
        return [self.parameters(Candidate(draft=draft, draft_length=rule)) for draft in self.usual]

    def identity(self) -> dict[str, Any]:
        """Return what two searches of one space have in common, as plain data."""
        drafts = [draft for group in self._exits.values() for draft in group.values()]
        ranges = {name: search_ranges(RULES[name], self._max_tokens) for name in self._rules}
        return {
            "kinds": list(self.kinds),
            "switches": list(self._skips.names) if self._skips else [],
            "exits": [f"{draft.exit_layer}, {TRAINED_HEAD if draft.trained_head else NO_HEAD}" for draft in drafts],
            "head_files": {file: sha256 for draft in drafts for file, sha256 in draft.files.items()},
            "bits": list(self._bits),
            "ids_below": list(self._ids_below),
            "lookups": list(self._lookups),
            "rules": {name: {key: list(each) for key, each in of.items()} for name, of in ranges.items()},
        }

    def _of_kind(self, trial: BaseTrial, kind: str) -> Draft:
        """Return the suggested draft of a kind, with the model's own weights, alone."""
        if kind in COPIES:
            return _suggest(trial, "lookup", COPIES[kind])
        if kind == SKIP_SET:
            assert self._skips is not None, "offered if there are items to skip"
            switched = [trial.suggest_categorical(name, (False, True)) for name in self._skips.names]
            return self._skips.draft(index for index, is_skipped in enumerate(switched) if is_skipped)
        wanted = trial.suggest_int("exit", 1, self._num_layers - 1)
        group = self._exits[min(self._exits, key=lambda layer: (abs(layer - wanted), layer))]
        return group[trial.suggest_categorical("head", tuple(group)) if len(group) > 1 else next(iter(group))]

    def _draft_parameters(self, draft: Draft) -> Parameters:
        found: Parameters = {"kind": draft.kind}
        if not draft.drafts:
            return found
        if draft.kind == SKIP_SET and self._skips is not None:
            chosen = self._skips.chosen(draft.skipped(self._num_layers))
            found |= {name: index in chosen for index, name in enumerate(self._skips.names)}
        elif draft.kind == EXIT:
            alone = draft.having(lookup=None, bits=None)
            places = {each: (layer, head) for layer, group in self._exits.items() for head, each in group.items()}
            if alone not in places:
                raise ValueError(f"exits that it considers: {', '.join(each.describe() for each in places) or 'none'}")
            found["exit"], head = places[alone]
            if len(self._exits[found["exit"]]) > 1:
                found["head"] = head
        elif draft.kind in COPIES:
            found |= _settings("lookup", draft)
        if "bits" in draft.takes:
            found["bits"] = f"int{draft.parts.bits}" if draft.parts.bits else OWN_WEIGHTS
        if "ids_below" in draft.takes and draft.parts.bits and len(self._ids_below) > 1:
            found["ids_below"] = str(draft.parts.ids_below or ALL_IDS)
        if "lookup" in draft.takes:
            first = draft.parts.lookup
            found["lookup"] = first.method_name if first else NOTHING_BEFORE
            found |= _settings("lookup", first) if first else {}
        return found

    def _usual(self) -> Iterator[Draft]:
        """Yield odd blocks, the whole model in each lower precision and exits in the middle."""
        if self._skips is not None:
            odd = tuple(range(1, self._num_layers - 1, 2))
            yield from [LayerSkip.blocks(odd)] if odd else []
            yield from (LayerSkip(bits=bits) for bits in self._bits.values() if bits is not None)
        for head in (NO_HEAD, TRAINED_HEAD):
            having = [group[head] for group in self._exits.values() if head in group]
            yield from having[(len(having) - 1) // 2 :][:1]


def _any_takes(
    drafts: Iterable[Draft], lookup: type[Lookup | SuffixLookup], accepts: Callable[[DraftDocument], bool]
) -> bool:
    takes = [draft for draft in drafts if "lookup" in draft.takes]
    return any(accepts(draft.having(lookup=each)) for draft in takes for each in _variants(lookup))


def _variants(document: type[Document]) -> list[Any]:
    """Return the document with its defaults, and with n-grams of one length if it has any."""
    lengths = range(1, 6) if "min_ngram" in document.model_fields else ()
    settings: list[dict[str, int]] = [{}, *({"max_ngram": length, "min_ngram": length} for length in lengths)]
    return [document(**each) for each in settings]


def _suggest(trial: BaseTrial, prefix: str, document: type[Document]) -> Any:
    """Return the document with the settings that the trial suggests."""
    values: dict[str, float] = {}
    for name in filter(RANGES.__contains__, document.model_fields):
        low, high, log = RANGES[name]
        if isinstance(low, int) and isinstance(high, int):
            values[name] = trial.suggest_int(f"{prefix}.{name}", low, high, log=log)
        else:
            values[name] = trial.suggest_float(f"{prefix}.{name}", low, high, log=log)
    if "min_ngram" in values:
        values["max_ngram"] = max(values["max_ngram"], values["min_ngram"])
    if "direct_from" in values:
        values["direct_from"] = min(values["direct_from"], values["max_ngram"])
        if values["direct_from"] <= values["min_ngram"]:  # all copies are verified at once
            del values["direct_from"]
    return document(**values)


def _settings(prefix: str, document: Document) -> Parameters:
    values = {name: getattr(document, name) for name in type(document).model_fields if name in RANGES}
    if values.get("direct_from", 1) is None:
        values["direct_from"] = 1
    for name, value in values.items():
        low, high, _ = RANGES[name]
        if not low <= value <= high:
            raise ValueError(f"{name} is searched between {low} and {high}, got {value}")
    return {f"{prefix}.{name}": value for name, value in values.items()}


def frequent_ids(target: Target) -> int | None:
    """Return the number of token ids that quantised drafts of `target` may keep to; None if its vocabulary is too small."""
    return FREQUENT_IDS if (target.lm_heads.num_rows or 0) >= 2 * FREQUENT_IDS else None


MOST_EXITS, MOST_PLAIN_EXITS = 12, 16


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Return the exits worth a head: the first half of `num_layers`, at most `MOST_EXITS` of them, evenly spread."""
    return _spread(num_layers // 2, MOST_EXITS)


def _spread(deepest: int, most: int) -> tuple[int, ...]:
    """Return the layers from 1 to `deepest`, or `most` of them, evenly spread."""
    if deepest <= most:
        return tuple(range(1, deepest + 1))
    return tuple(1 + round(index * (deepest - 1) / (most - 1)) for index in range(most))


DEFAULT_BITS: tuple[BitWidth, ...] = (8,)
"""Precisions where quantised layers are fast. The whole model agrees with the target on 0.99 of the demo's positions in int8 and on
0.92 in int4; on SmolLM2-135M on 0.99 and 0.89. Each precision is another copy of the weights and more passes to time."""

Kind = Literal["skip_set", "exit_head", "lookup"]


class SpaceSettings(StudySettings):
    """Settings of a search over the whole space."""

    kinds: tuple[Kind, ...] = Field(
        ("skip_set", "exit_head", "lookup"),
        min_length=1,
        description="drafts to consider: skip sets (exits without a head included), exits with a head, "
        "prompt lookup alone and before the others",
    )
    rules: RuleNames = Field(DEFAULT_RULES, description="draft-length rules to choose among")
    max_tokens: int = Field(12, ge=1, le=64, description="longest draft to consider (K)")
    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider with a head; default: up to 12 of the model's"
    )
    bits: tuple[BitWidth, ...] | None = Field(
        None,
        description="precisions of quantised drafts: the whole model, exits and skip sets; default: 8 on a CPU with AVX2, "
        "none elsewhere",
    )
    whole_blocks: bool = Field(False, description="skip whole blocks only, not attention and MLP apart")
    candidates: tuple[Candidate, ...] = Field(
        (), description="drafts with their rules to measure first, such as those of earlier profiles"
    )

    def check(self, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        for exit_layer in self.exit_layers or ():
            target.check_exit_layer(exit_layer)

    def for_engine(self, rules: Sequence[str], *, quantises: bool, whole_blocks: bool) -> dict[str, Any]:
        """Return settings for what the engine can skip, in the precisions that it can make."""
        changed = {"rules": rules_within(self, rules), "whole_blocks": whole_blocks or self.whole_blocks}
        return changed if quantises else {**changed, "bits": ()}

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head."""
        return tuple(self.exit_layers or default_exit_layers(num_layers)) if "exit_head" in self.kinds else ()

    def wanted_bits(self, device: torch.device) -> tuple[BitWidth, ...]:
        """Return the precisions of the quantised drafts to consider: those asked for, or by default those that may pay.

        Raises `UnsupportedModelError` if some are asked for where none can run.
        """
        if not {"skip_set", "exit_head"} & set(self.kinds):
            return ()
        if self.bits is None:
            return DEFAULT_BITS if kernel_for("int8", device).kernel is not None else ()
        if self.bits:
            check_quantised(device)
        return self.bits

    def exits(self, problem: Problem) -> list[list[EarlyExit]]:
        """Return the exits to consider: without a head, at most `MOST_PLAIN_EXITS` that are evenly spread, then with one."""
        num_layers = problem.target.num_layers
        layers = _spread(num_layers - 1, MOST_PLAIN_EXITS) if "skip_set" in self.kinds else ()
        plain = [EarlyExit(exit_layer=layer) for layer in layers]
        wanted = self.wanted_heads(num_layers)
        return [plain, [draft for layer, draft in problem.head_drafts.items() if layer in wanted]]

    def space(self, problem: Problem) -> Space:
        """Return the space of a search on this problem."""
        target = problem.target
        return Space(
            target,
            rules=self.rules,
            max_tokens=self.max_tokens,
            skips=SkipSpace.of(target, whole_blocks=self.whole_blocks) if "skip_set" in self.kinds else None,
            exits=[draft for group in self.exits(problem) for draft in group],
            copies="lookup" in self.kinds,
            bits=self.wanted_bits(target.device),
            accepts=problem.accepts,
        )
