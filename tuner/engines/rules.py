"""What an engine can run of drafts and rules, asked before anything is written or started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoding.draft_length import Fixed
from decoding.profile import Decoding, DraftProfile, TargetIdentity
from studies.contract import Candidate
from tuner.engines.expectation import engine_candidate
from tuner.errors import ExportError
from tuner.export.engines.registry import load_engine
from tuner.export.plan import plan_for
from tuner.export.shape import reduced

if TYPE_CHECKING:
    from decoding.drafts import DraftDocument
    from tuner.export.engines.contract import Engine
    from tuner.export.plan import Plan

NOWHERE = Path("/sdtune-export")
"""Folder of plans that are only looked at."""


class EngineRules:
    """The rules of the engine `name` for drafts of one target."""

    def __init__(self, name: str, target: TargetIdentity, config: Any, *, model: str) -> None:
        """`config` is the target's configuration, `model` its folder or hub id as the engine is to load it."""
        self.name = name
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
        return engine_candidate(self.plan(candidate))

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
