"""A search that deploys to an engine: its settings, restricted to what the engine runs, and trials by its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.engines.candidates import EngineRules
from tuner.engines.contract import find_engine
from tuner.errors import ConfigError
from tuner.export.engines.registry import load_engine
from tuner.export.run import model_folder_of

if TYPE_CHECKING:
    from decoding.profile import TargetIdentity
    from studies.contract import Candidate
    from studies.measurement import Measurement
    from tuner.config import SearchConfig
    from tuner.engines.contract import EngineProgram
    from tuner.inputs.models import Loaded
    from tuner.measuring.turns import Measuring, OnSample


@dataclass(frozen=True)
class Deployment:
    """The engine of a search, and what it can run."""

    program: EngineProgram
    rules: EngineRules


def deployment_of(config: SearchConfig, loaded: Loaded, identity: TargetIdentity) -> Deployment | None:
    """Return the deployment of a search, None for one that stays in this process; raise `EngineError` if it is not installed."""
    if config.deploy_to is None:
        return None
    program = find_engine(config.deploy_to, config.engine_home)
    folder = model_folder_of(loaded.name, loaded.revision)
    return Deployment(program, EngineRules(config.deploy_to, identity, loaded.model.config, model=str(folder)))


def restricted(config: SearchConfig) -> SearchConfig:
    """Return the configuration of a search whose candidates the engine of `deploy_to` can run.

    Raises `ConfigError` for a study's settings that exclude what the engine runs.
    """
    if config.deploy_to is None:
        return config
    engine = load_engine(config.deploy_to)
    studies = dict(config.studies)
    for name in config.study:
        try:
            changes = config.study_settings(name).for_engine(engine.rules, quantises=engine.quantises)
        except ValueError as cause:
            raise ConfigError(f"studies.{name}: {cause}") from None
        studies[name] = {**studies.get(name, {}), **changes}
    return config.model_copy(update={"studies": studies, "prefix_reuse": False})


class RuledBench:
    """A bench that measures only what an engine runs as it is; see `Measuring`."""

    def __init__(self, bench: Measuring, rules: EngineRules) -> None:
        self._bench, self._rules = bench, rules

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the measurable prompts."""
        return self._bench.indices

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: OnSample = lambda sample: None
    ) -> Measurement:
        """Measure a candidate at these indices; raise `ExportError` for one that the engine runs otherwise or not at all."""
        self._rules.check(candidate)
        return self._bench.measure(candidate, indices, on_sample)

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """Return the candidate with its rule warmed up; see `measure`."""
        self._rules.check(candidate)
        return self._bench.warm_up_rule(candidate, indices)
