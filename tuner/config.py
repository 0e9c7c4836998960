"""Settings of a search and of distillation: frozen documents, read from a YAML file, the command line, or both.

Each field is written once: its name is the YAML key and the flag, its description is the help text.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from decoding.documents.strict_yaml import Document, Duration, Line, merged, read_mapping, validate
from decoding.drafts import BitWidth, Layers
from decoding.profile import ExactWidth
from decoding.runners import AUTO, PLAIN_RUNNER, bit_exact_runners
from studies.samplers import DEFAULT_STUDIES, SAMPLERS, load_sampler
from tuner.errors import ConfigError
from tuner.fields import (
    BUDGET,
    DECODING,
    DEFAULT_STORE,
    ENGINE,
    EXECUTOR,
    OUTPUTS,
    PROBLEM,
    DataSettings,
    Device,
    Dtype,
    EngineArgs,
    EngineHome,
    EngineName,
    Model,
    Names,
    Revision,
    RunnerWish,
    Seed,
    Threads,
)

if TYPE_CHECKING:
    import torch

EXACT_WIDTH = 8
"""Default width of bit-exact mode: drafts of up to seven tokens."""
LEAST_TO_COMPILE = 2**26
"""Bytes of a model on a CPU below which passes of fixed shapes are not compiled, and compared, unless asked for."""
FEWEST_SAMPLES = 2
"""Prompts, or batches of prompts, that an interval needs at least."""


class DistillSettings(Document):
    """Settings of distillation: the `distillation:` mapping of a configuration, and flags of `sdtune distill`."""

    HEADING: ClassVar[str] = "Training"

    exit_layers: Layers | None = Field(
        None,
        min_length=1,
        description="Exits to train heads for, as numbers of layers, e.g. 2,4,6-12; default: spread over the first half.",
        json_schema_extra={"metavar": "LIST"},
    )
    training_dataset: str | None = Field(
        None,
        description="Dataset of training prompts; default: rows of --dataset that are neither tuning nor held-out prompts.",
    )
    training_column: str | None = Field(
        None,
        description="Column of the prompt in the training dataset; default: the search's template or preset, or guessed.",
        json_schema_extra={"metavar": "COLUMN"},
    )
    prompts: int = Field(1024, ge=1, description="Most training prompts to use.")
    samples: int = Field(8, ge=1, description="Continuations sampled from each prompt; one if the temperature is 0.")
    temperature: float = Field(1.0, ge=0.0, description="Sampling temperature of the continuations; 0 is greedy.")
    prompt_tokens: int = Field(
        256,
        ge=1,
        description="Most tokens of a training prompt; longer ones are cut from the left, as only continuations teach.",
    )
    response_tokens: int = Field(64, ge=1, description="Most tokens of a continuation.")
    steps: int = Field(600, ge=1, description="Training steps.")
    timeout: Duration | None = Field(
        None,
        description="Time for texts, training of all heads and their evaluation, e.g. 10m; fewer texts are written, and the "
        "learning-rate schedule is compressed, to fit.",
        json_schema_extra={"metavar": "DURATION"},
    )
    batch_size: int = Field(4, ge=1, description="Sequences per training step.")
    writing_batch_size: int = Field(32, ge=1, description="Continuations sampled at a time.")
    learning_rate: float | None = Field(
        None, gt=0.0, le=1.0, description="Peak learning rate, after the warm-up; default: 1 / hidden size."
    )
    heads_at_once: int | None = Field(
        None, ge=1, description="Heads trained at a time; default: as many as fit in the free memory."
    )
    checkpoint_every: int = Field(100, ge=1, description="Steps between checkpoints.")

    @property
    def samples_per_prompt(self) -> int:
        """Number of continuations per prompt: greedy ones are all equal, so one is enough."""
        return self.samples if self.temperature > 0 else 1


class ModelSettings(Document):
    """Model of a search. It comes first among the settings."""

    model: Model
    revision: Revision = None


class SearchConfig(DataSettings, ModelSettings):
    """Settings of `sdtune search`; every key but the two mappings is also a flag of the same name."""

    tuning_prompts: int = Field(
        24, ge=2, description="Prompts for trials and for the race of the finalists.", json_schema_extra=PROBLEM
    )
    held_out_prompts: int = Field(
        24,
        ge=2,
        description="Prompts for the reported figures; no trial decodes them.",
        json_schema_extra=PROBLEM,
    )
    max_new_tokens: int = Field(
        64, ge=2, le=2**20, description="Tokens to generate from each prompt.", json_schema_extra=PROBLEM
    )
    seed: Seed = 0
    study: Names = Field(
        DEFAULT_STUDIES,
        min_length=1,
        description=f"Studies to run, in order; repeatable: {', '.join(SAMPLERS)}, or optuna:NAME for a sampler of Optuna.",
        json_schema_extra={**BUDGET, "metavar": "NAME"},
    )
    trials: int | None = Field(
        None, ge=1, description="Most trials of each study; default: no limit.", json_schema_extra=BUDGET
    )
    timeout: Duration | None = Field(
        None,
        description="Search time of all studies, resumed runs included, e.g. 90s, 10m, 1h; default: no limit.",
        json_schema_extra={**BUDGET, "metavar": "DURATION"},
    )
    prompts_per_trial: int = Field(
        6,
        ge=2,
        description="Tuning prompts that a trial decodes; the others are kept for the race.",
        json_schema_extra=BUDGET,
    )
    finalists: int = Field(
        4, ge=1, description="Candidates that race on the other tuning prompts.", json_schema_extra=BUDGET
    )
    stock: bool = Field(
        True,
        description="At the end compare with transformers' generate and its prompt lookup, on a few held-out prompts.",
        json_schema_extra=BUDGET,
    )
    temperature: float = Field(
        0.0,
        ge=0.0,
        le=100.0,
        allow_inf_nan=False,
        description="Sampling temperature; 0 is greedy.",
        json_schema_extra=DECODING,
    )
    batch_size: int = Field(
        1,
        ge=1,
        description="Prompts decoded in lockstep, as production will; intervals are then over batches.",
        json_schema_extra=DECODING,
    )
    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    runner: RunnerWish | None = Field(
        None,
        description="How passes run: eager; static, in fixed shapes and compiled (CUDA graphs on a GPU); auto, the faster one; "
        "default: auto; eager on a CPU for models below 64 MiB, which are not worth the compilation.",
        json_schema_extra=DECODING,
    )
    exact: Literal["tokens", "bitwise"] = Field(
        "tokens",
        description="Required equality with plain decoding: tokens, up to numerical ties in low precision, or bitwise, with "
        "every pass of the whole model at one width.",
        json_schema_extra=DECODING,
    )
    exact_width: ExactWidth = Field(
        EXACT_WIDTH,
        description="Positions of every pass of the whole model with --exact bitwise: longest draft + 1.",
        json_schema_extra=DECODING,
    )
    prefix_reuse: bool = Field(
        True,
        description="Start verification at the first block that the draft changes, reusing the draft's states before it.",
        json_schema_extra=DECODING,
    )
    history: int = Field(
        0,
        ge=0,
        le=2**24,
        description="Tokens of earlier answers that suffix automata may copy from, as a server's users repeat themselves; each "
        "candidate begins without any.",
        json_schema_extra=DECODING,
    )
    deploy_to: EngineName | None = Field(
        None,
        description="Tune for this engine: only drafts that it loads, and finalists raced and confirmed in the engine itself.",
        json_schema_extra=ENGINE,
    )
    engine_home: EngineHome = None
    engine_args: EngineArgs = None
    workers: int = Field(
        1,
        ge=1,
        description="Processes of this host that run the search, each on a GPU or an equal share of the processors of its own.",
        json_schema_extra=EXECUTOR,
    )
    ray: str | None = Field(
        None,
        description="Run the search on every device of this Ray cluster: HOST:6379, or auto, the one that this machine belongs to.",
        json_schema_extra={**EXECUTOR, "metavar": "ADDRESS"},
    )
    heads: Path = Field(
        Path("exit_heads"),
        description="Folder of the exit heads; missing ones are distilled into it.",
        json_schema_extra={**OUTPUTS, "metavar": "DIR"},
    )
    distill: Literal["auto", "never"] = Field(
        "auto",
        description="Distil the missing exit heads that a study wants, or search without them.",
        json_schema_extra=OUTPUTS,
    )
    distillation: DistillSettings = Field(
        default_factory=DistillSettings, description="How missing exit heads are distilled."
    )
    storage: str = Field(
        "sqlite:///sdtune.db",
        description="Optuna storage of the finished trials; also SDTUNE_DATABASE.",
        json_schema_extra={**OUTPUTS, "metavar": "URL"},
    )
    tracking_uri: str = Field(
        DEFAULT_STORE,
        description="MLflow tracking store; also MLFLOW_TRACKING_URI.",
        json_schema_extra={**OUTPUTS, "metavar": "URL"},
    )
    experiment: Line | None = Field(
        None,
        description="Name in the storage and in MLflow; default: names of model and dataset.",
        json_schema_extra={**OUTPUTS, "metavar": "NAME"},
    )
    out: Path = Field(Path("profile.yaml"), description="File of the profile.", json_schema_extra=OUTPUTS)
    studies: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Settings of the studies, by study name."
    )

    @field_validator("study")
    @classmethod
    def _studies_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in SAMPLERS:
                load_sampler(name)
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _settings_fit(self) -> SearchConfig:
        for name, settings in self.studies.items():
            self._validated(name, settings)
        if self.exact == "bitwise" and self.runner not in (None, AUTO, *bit_exact_runners()):
            capable = " or ".join((*bit_exact_runners(), AUTO))
            raise ValueError(f"exact: bitwise is not a mode of the runner {self.runner}: give --runner {capable}")
        if self.exact != "bitwise" and "exact_width" in self.model_fields_set:
            raise ValueError("exact_width is a setting of bit-exact mode: give --exact bitwise as well")
        if self.prompts_per_trial > self.tuning_prompts:
            raise ValueError(
                f"a trial decodes {self.prompts_per_trial} prompts, but there are only {self.tuning_prompts} tuning prompts"
            )
        return self

    @model_validator(mode="after")
    def _engine_decodes_so(self) -> SearchConfig:
        if self.deploy_to is None:
            if given := [name for name in ("engine_home", "engine_args") if getattr(self, name) is not None]:
                raise ValueError(f"{', '.join(given)}: settings of the engine of deploy_to, which is not given")
            return self
        wrong = {
            "temperature": self.temperature > 0,
            "batch_size": self.batch_size > 1,
            "exact": self.exact != "tokens",
            "history": self.history > 0,
        }
        if found := [name for name, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(
                f"deploy_to: finalists decode greedily in the engine, one sequence at a time, and texts are compared: leave out "
                f"{', '.join(found)}"
            )
        return self

    @model_validator(mode="after")
    def _devices_are_asked_for(self) -> SearchConfig:
        several = {"workers": self.workers > 1, "ray": self.ray is not None}
        given = [name for name, is_given in several.items() if is_given]
        if len(given) == 2:
            raise ValueError("workers, ray: processes of this host or of a cluster: leave out one of the two")
        if given and self.device == "spread":
            raise ValueError(
                f"{given[0]}: a process has one GPU, and the device spread is all of them: leave out one of the two"
            )
        return self

    @model_validator(mode="after")
    def _batches_suffice(self) -> SearchConfig:
        for name in ("tuning_prompts", "held_out_prompts"):
            count, size = getattr(self, name), self.batch_size
            if count < FEWEST_SAMPLES * size:
                batches = "batch" if count // size == 1 else "batches"
                raise ValueError(
                    f"{name}: {count} make {count // size} whole {batches} of {size}, and {FEWEST_SAMPLES} are needed: give "
                    f"{FEWEST_SAMPLES * size} or more (an interval is over batches)"
                )
        return self

    @property
    def samples_per_trial(self) -> int:
        """Number of samples in a trial: prompts, or the whole batches that hold them.

        At least two, because candidate and plain decoding take turns in going first.
        """
        return max(FEWEST_SAMPLES, -(-self.prompts_per_trial // self.batch_size))

    @property
    def bitwise_width(self) -> int | None:
        return self.exact_width if self.exact == "bitwise" else None

    def runner_on(self, device_type: str, weight_bytes: int) -> str:
        """Return the runner of a model on a device of this type, as `torch.device.type` names it; it may be `AUTO`.

        Unless one is given, it is the faster one, though a small model on a CPU is not compiled to find out.
        """
        is_small = device_type == "cpu" and weight_bytes < LEAST_TO_COMPILE
        return self.runner or (PLAIN_RUNNER if is_small else AUTO)

    def wanted_bits(self, device: torch.device) -> tuple[BitWidth, ...]:
        """Return the precisions in which the studies propose quantised drafts for a model on `device`."""
        found = (self.study_settings(name).wanted_bits(device) for name in self.study)
        return tuple(sorted({bits for each in found for bits in each}))

    def study_settings(self, name: str) -> Any:
        return self._validated(name, self.studies.get(name, {}))

    def resolved_experiment(self) -> str:
        return self.experiment or f"{Path(self.model).name}-{Path(self.dataset).stem}"

    @staticmethod
    def _validated(name: str, settings: Mapping[str, Any]) -> Any:
        return validate(load_sampler(name).Settings, settings, source=f"studies.{name}", error=ConfigError)


ENVIRONMENT: Mapping[str, str] = {"storage": "SDTUNE_DATABASE", "tracking_uri": "MLFLOW_TRACKING_URI"}
"""Environment variables of addresses, which may hold passwords: command lines can be read by all users of a machine."""


NAMELESS = {"model": "-", "dataset": "-"}
"""Stand-ins of the required settings, where the others are validated."""


def load_config(path: Path | None, given: Mapping[str, Any]) -> SearchConfig:
    """Return the configuration of a file, overridden by what the command line gives.

    What neither gives is taken from the `ENVIRONMENT`. Raises `ConfigError` naming the wrong key.
    """
    from_file = {
        **{key: os.environ[name] for key, name in ENVIRONMENT.items() if os.environ.get(name)},
        **(read_mapping(path, what="configuration", error=ConfigError) if path else {}),
    }
    both = merged(from_file, given)
    source = str(path) if path and not _is_wrong_flag(given) else "command line"
    for required in ("model", "dataset"):
        if required not in both:
            validate(SearchConfig, {**NAMELESS, **both}, source=source, error=ConfigError)  # of a misspelt key
            raise ConfigError(f"which {required}? give --{required} or a `{required}:` in the file of --config")
    return validate(SearchConfig, both, source=source, error=ConfigError)


def _is_wrong_flag(given: Mapping[str, Any]) -> bool:
    """Return whether the flags alone are invalid, so that the message blames the command line and not the file."""
    try:
        validate(SearchConfig, {**NAMELESS, **given}, source="", error=ConfigError)
    except ConfigError:
        return True
    return False
