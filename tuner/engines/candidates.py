"""Candidates of a search for one engine: what it can run of drafts and rules, and their exports, a folder per draft model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import Lookup, PromptLookup
from decoding.profile import Decoding, DraftProfile, TargetIdentity
from studies.contract import Candidate
from tuner.errors import ExportError
from tuner.export.engines.registry import load_engine
from tuner.export.engines.vllm import native_flags
from tuner.export.plan import Plan, plan_for
from tuner.export.run import Source, write_draft
from tuner.export.shape import reduced
from tuner.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decoding.draft_length import DraftLengthRule
    from decoding.drafts import DraftDocument
    from tuner.engines.contract import EngineProgram
    from tuner.export.engines.contract import Engine
    from tuner.inputs.models import Loaded

NOWHERE = Path("/sdtune-export")
"""Folder of plans that are only looked at."""
LOOKUPS = ((2, 4), (3, 8), (4, 12))
"""Length of the n-grams and most tokens to copy, of the engine's own lookups that are measured in any case.

An engine may not copy fewer tokens than the n-gram has: llama.cpp drafts nothing then.
"""
LENGTHS = (2, 4, 8)
"""Fixed numbers of drafted tokens that are tried in the engine for each draft model."""
LIMIT, THRESHOLD = 8, 0.6
"""Limit and threshold of the rule that is tried beside them where the engine stops at an unlikely token."""


def own_lookups() -> list[Candidate]:
    """Return prompt lookups alone, which cost a draft model nothing: what the engine does without any tuning of layers."""
    return [
        Candidate(draft=PromptLookup(max_ngram=ngram, min_ngram=ngram), draft_length=Fixed(max_tokens=copied))
        for ngram, copied in LOOKUPS
    ]


def other_lengths(candidate: Candidate, *, stops_below: bool) -> list[Candidate]:
    """Return the candidate with other draft-length rules: which one is best depends on what a pass costs in the engine."""
    if not candidate.draft.runs_model:
        return []
    rules: list[DraftLengthRule] = [Fixed(max_tokens=length) for length in LENGTHS]
    if stops_below:
        rules.append(TopProbability(max_tokens=LIMIT, threshold=THRESHOLD))
    return [candidate.with_rule(rule) for rule in rules if rule != candidate.draft_length]


def engine_candidate(plan: Plan) -> Candidate:
    """Return the profile's draft and rule as the engine runs them."""
    draft, lookup = plan.profile.draft, plan.lookup
    if plan.shape is None:
        assert lookup is not None, "a draft without a model is a lookup"
        copies = PromptLookup(max_ngram=lookup.longest, min_ngram=lookup.shortest)
        return Candidate(draft=copies, draft_length=Fixed(max_tokens=lookup.max_tokens))
    alone = draft.having(lookup=None, ids_below=None)
    if plan.bits is None and alone.parts.bits is not None:
        alone = alone.having(bits=None)
    if lookup is not None:
        first = Lookup(max_ngram=lookup.longest, min_ngram=lookup.shortest, max_tokens=lookup.max_tokens)
        alone = alone.having(lookup=first)
    most = plan.length.num_tokens
    own: DraftLengthRule = (
        Fixed(max_tokens=most) if plan.threshold is None else TopProbability(max_tokens=most, threshold=plan.threshold)
    )
    return Candidate.model_validate({"draft": alone, "draft_length": own})


class EngineRules:
    """The rules of the engine `name` for drafts of one target."""

    def __init__(
        self, name: str, target: TargetIdentity, config: Any, *, model: str, runs_profiles: bool = False
    ) -> None:
        """`config` is the target's configuration, `model` its folder or hub id as the engine is to load it.

        `runs_profiles` tells that it drafts with a profile itself: nothing is exported then.
        """
        self.name, self.runs_profiles = name, runs_profiles
        self.engine: Engine = load_engine(name)
        self._target, self._config, self._model = target, config, model

    def profile(self, candidate: Candidate) -> DraftProfile:
        """Return a candidate as a profile without figures."""
        return DraftProfile(
            name="candidate",
            target=self._target,
            draft=candidate.draft,
            draft_length=candidate.draft_length,
            decoding=Decoding(prefix_reuse=False),
        )

    def plan(self, candidate: Candidate, out: Path = NOWHERE) -> Plan:
        """Return the plan of a candidate's export into `out`; raise `ExportError` for one that the engine cannot run."""
        draft = reduced(candidate.draft, (), keeps_bits=self.engine.quantises)
        return plan_for(
            self.profile(candidate),
            self.engine,
            draft,
            self._config,
            model=self._model,
            dtype=self._target.dtype,
            out=out,
        )

    def as_run(self, candidate: Candidate) -> Candidate:
        """Return the candidate as the engine runs it; raise `ExportError` for one that it cannot run."""
        if not self.runs_profiles:
            return engine_candidate(self.plan(candidate))
        first = candidate.draft.parts.lookup
        if first is not None and first.checks_copies:
            raise ExportError(f"{self.engine.title} drafts one token at a time: it checks no copies")
        if native_flags(self.profile(candidate), NOWHERE) is None:
            raise ExportError(
                f"{self.engine.title} does not run {candidate.draft.describe()}; {candidate.draft_length.describe()}"
            )
        return candidate

    def check(self, candidate: Candidate) -> None:
        """Raise `ExportError` unless the engine runs the candidate as it is.

        Of a lookup alone the rule's limit counts only: a rule has no distributions to look at.
        """
        if not candidate.draft.drafts:
            return
        run = self.as_run(candidate)
        if run.draft != candidate.draft:
            raise ExportError(
                f"{self.engine.title} runs {run.draft.describe()} in place of {candidate.draft.describe()}"
            )
        if run.draft_length != candidate.draft_length and candidate.draft.runs_model:
            raise ExportError(
                f"{self.engine.title} drafts by {run.draft_length.describe()} in place of {candidate.draft_length.describe()}"
            )

    def accepts(self, draft: DraftDocument) -> bool:
        """Return whether the engine runs the draft as it is."""
        try:
            self.check(Candidate.model_validate({"draft": draft, "draft_length": Fixed()}))
        except ExportError:
            return False
        return True


class CandidateExports:
    """Writes the draft model of each candidate once, into folders of `out`, which share the files of the target."""

    def __init__(self, program: EngineProgram, rules: EngineRules, loaded: Loaded, heads: Path, out: Path) -> None:
        """`heads` is the folder of the exit heads."""
        self.rules = rules
        self._program, self._loaded, self._heads, self._out = program, loaded, heads, out
        self._folders: dict[DraftDocument | None, Path] = {}
        self._profiles: dict[str, Path] = {}
        self.remarks: list[str] = []
        """What the engine's files differ in, one sentence each."""
        self.plain, _ = self._export(own_lookups()[0])
        """A plan whose folder holds the target and no draft model."""

    def write(self, candidate: Candidate) -> tuple[Plan, tuple[str, ...]]:
        """Write what is missing of the candidate's export, and return its plan and its flags.

        Raises `ExportError` or `EngineError` if it cannot be written.
        """
        if self.rules.runs_profiles:
            return self.plain, self._profile_flags(candidate)
        return self._export(candidate)

    def _profile_flags(self, candidate: Candidate) -> tuple[str, ...]:
        """Write the candidate's profile beside its head, and return the flags by which the engine drafts with it."""
        profile, known = self.rules.profile(candidate), self._profiles.get(candidate.key)
        path = known or self._out / f"profile-{len(self._profiles)}.yaml"
        if known is None:
            if (head := profile.draft.trained_head) is not None and not (self._out / head.file).exists():
                (self._out / head.file).symlink_to((self._heads / head.file).absolute())
            profile.save(path)
            self._profiles[candidate.key] = path
        flags = native_flags(profile, path)
        assert flags is not None, "only what the engine runs is measured in it"
        return flags

    def _export(self, candidate: Candidate) -> tuple[Plan, tuple[str, ...]]:
        draft = candidate.draft
        key = draft.having(lookup=None) if draft.runs_model else None
        known = self._folders.get(key)
        folder = known or self._out / f"draft-{len(self._folders)}"
        plan = self.rules.plan(candidate, folder)
        if known is None:
            self._prepare(plan)
            self._folders[key] = folder
        return plan, self._program.draft_flags(plan)

    def shown(self, words: Sequence[str]) -> list[str]:
        """Return the words of a command without the folder of this machine."""
        return [word.replace(f"{self._out}/", "") for word in words]

    def _prepare(self, plan: Plan) -> None:
        plan.out.mkdir()
        for name in self._program.target_files:
            if self._folders:
                (plan.out / name).symlink_to(self.plain.out / name)
        if plan.needs_draft_folder:
            source = Source(plan.profile, self._heads, self._loaded, Path(plan.model))
            write_draft(plan, self.rules.engine, source, plan.profile.draft, plan.out, Progress())
        self.remarks += [
            each for each in self._program.prepare(plan, plan.out / "convert.log") if each not in self.remarks
        ]
