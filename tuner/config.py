"""What a search is asked to do: one frozen document, from a YAML file, the command line, or both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from decoding.documents.strict_yaml import Document, Duration, read_mapping, suggest, validate
from decoding.profile import ExactWidth, Layers
from studies import DEFAULT_STUDIES, STUDIES
from tuner.errors import ConfigError

EXACT_WIDTH = 8
"""Of the bit-exact mode where nothing else is said: drafts of up to seven tokens."""
FEWEST_PLACES = 2
"""Prompts, or batches of them, without which there is no interval."""


class DistillSettings(Document):
    """How heads are distilled: the `distill:` mapping of a configuration, and flags of `sdtune distill`."""

    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to train heads for, in one pass; default: spread over the first half"
    )
    lessons: str | None = Field(
        None,
        description="dataset of prompts to learn from; default: rows of the search's that are in neither of its parts",
    )
    lessons_column: str | None = Field(None, description="column of the prompts in the dataset of `lessons`")
    prompts: int = Field(1024, ge=1, description="prompts to write texts from at most")
    samples: int = Field(8, ge=1, description="texts written from each prompt; one if the temperature is 0")
    temperature: float = Field(1.0, ge=0.0, description="at which the texts are written; 0 is greedy")
    response_tokens: int = Field(64, ge=1, description="most tokens of a text behind its prompt")
    steps: int = Field(600, ge=1, description="training steps")
    timeout: Duration | None = Field(
        None, description="training time (90s, 10m, 1h), resumed runs included; the schedule is compressed to fit"
    )
    batch_size: int = Field(4, ge=1, description="texts a training step")
    writing_batch_size: int = Field(32, ge=1, description="texts written at a time")
    learning_rate: float | None = Field(
        None, gt=0.0, description="at its height, behind the warm-up; default: 1 over the hidden size"
    )
    checkpoint_every: int = Field(100, ge=1, description="steps")

    @property
    def samples_per_prompt(self) -> int:
        """Greedy texts of one prompt are all the same: one is enough."""
        return self.samples if self.temperature > 0 else 1


class SearchConfig(Document):
    """The settings of `sdtune search`; every key is also a flag of the same name."""

    model: str = Field(description="folder or hub id of a causal language model")
    revision: str | None = Field(None, description="revision of the model on the hub")
    dataset: str = Field(description="file, folder, hub id or preset with prompts")
    prompt_column: str | None = Field(None, description="column that holds the prompt")
    group_column: str | None = Field(
        None, description="rows with the same value never stand in both parts of the prompts"
    )
    chat_template: bool = Field(True, description="apply the tokenizer's chat template if it has one")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="cut longer prompts from the left; without it they are an error"
    )
    study: tuple[str, ...] = Field(DEFAULT_STUDIES, min_length=1, description="searches to run, in order")
    trials: int | None = Field(None, ge=1, description="trials of each study at most")
    timeout: Duration | None = Field(
        None, description="search time over all studies (90s, 10m, 1h), resumed runs included"
    )
    max_new_tokens: int = Field(64, ge=2, description="tokens to generate from each prompt")
    tuning_prompts: int = Field(24, ge=2, description="prompts to search and race on")
    held_out_prompts: int = Field(24, ge=2, description="prompts for the reported figures, never seen by the search")
    prompts_per_trial: int = Field(
        6, ge=2, description="tuning prompts that a trial decodes; the others are kept for the race"
    )
    batch_size: int = Field(
        1,
        ge=1,
        description="prompts that are decoded in step, by every candidate and plainly; the best profile depends on it",
    )
    finalists: int = Field(4, ge=1, description="candidates that race on the remaining tuning prompts")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="precision of the weights")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1 ...")
    threads: int | None = Field(
        None, ge=1, description="CPU threads for torch; small models gain nothing from more than one"
    )
    runner: Literal["auto", "eager", "static"] = Field(
        "eager",
        description="how passes are executed: as they are, in fixed shapes and compiled, or whichever is faster",
    )
    exact: Literal["tokens", "bitwise"] = Field(
        "tokens",
        description="drafted text is plain text: token for token up to numerical ties, or bit for bit in a mode of fixed widths",
    )
    exact_width: ExactWidth = Field(EXACT_WIDTH, description="positions of every pass of the whole model in that mode")
    prefix_reuse: bool = Field(True, description="verify only from the first block that the draft computes otherwise")
    heads: Path = Field(Path("exit_heads"), description="folder of the exit heads; missing ones are distilled into it")
    distill: Literal["auto", "never"] = Field(
        "auto", description="distil the exit heads that a study wants and that are missing, or search without them"
    )
    distillation: DistillSettings = Field(
        default_factory=DistillSettings, description="how missing heads are distilled"
    )
    storage: str = Field("sqlite:///sdtune.db", description="Optuna storage with the finished trials")
    tracking_uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking store")
    experiment: str | None = Field(None, description="name in storage and MLflow; default: model and dataset")
    out: Path = Field(Path("profile.yaml"), description="where the profile is written")
    seed: int = Field(0, ge=0, description="seed of the split, the samplers and the sampling")
    studies: dict[str, dict[str, Any]] = Field(default_factory=dict, description="settings of each study, by its name")

    @field_validator("study")
    @classmethod
    def _studies_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in STUDIES:
                raise ValueError(f"unknown study {name!r}; {suggest(name, STUDIES)}")
        return tuple(dict.fromkeys(names))

    @model_validator(mode="after")
    def _settings_fit(self) -> SearchConfig:
        for name, settings in self.studies.items():
            if name not in STUDIES:
                raise ValueError(f"studies: unknown study {name!r}; {suggest(name, STUDIES)}")
            self._validated(name, settings)
        if self.exact == "bitwise" and self.runner == "eager" and "runner" in self.model_fields_set:
            raise ValueError("exact: bitwise is a mode of the static runner: give --runner static or auto, not eager")
        if self.exact != "bitwise" and "exact_width" in self.model_fields_set:
            raise ValueError("exact_width is that of the bit-exact mode: give --exact bitwise as well")
        if self.prompts_per_trial > self.tuning_prompts:
            raise ValueError(
                f"a trial decodes {self.prompts_per_trial} prompts, but there are only {self.tuning_prompts} tuning prompts"
            )
        return self

    @model_validator(mode="after")
    def _batches_suffice(self) -> SearchConfig:
        for name in ("tuning_prompts", "held_out_prompts"):
            count, size = getattr(self, name), self.batch_size
            if count < FEWEST_PLACES * size:
                batches = "batch" if count // size == 1 else "batches"
                raise ValueError(
                    f"{name}: {count} make {count // size} whole {batches} of {size}, and {FEWEST_PLACES} are needed: give "
                    f"{FEWEST_PLACES * size} or more (an interval is over batches)"
                )
        return self

    @property
    def places_per_trial(self) -> int:
        """What a trial measures on, if there is as much: prompts, or as many whole batches as hold them, two at least, as
        candidate and plain decoding take turns in going first."""
        return max(FEWEST_PLACES, -(-self.prompts_per_trial // self.batch_size))

    @property
    def bitwise_width(self) -> int | None:
        """The width of the bit-exact mode if that was asked for."""
        return self.exact_width if self.exact == "bitwise" else None

    def study_settings(self, name: str) -> Any:
        """The settings of one study, its defaults filled in."""
        return self._validated(name, self.studies.get(name, {}))

    def resolved_experiment(self) -> str:
        """The experiment's name: as given, or the last parts of the model's and the dataset's."""
        return self.experiment or f"{Path(self.model).name}-{Path(self.dataset).stem}"

    @staticmethod
    def _validated(name: str, settings: Mapping[str, Any]) -> Any:
        return validate(STUDIES[name].Settings, settings, source=f"studies.{name}", error=ConfigError)


def load_config(
    path: Path | None, flags: Mapping[str, Any], distillation: Mapping[str, Any] = MappingProxyType({})
) -> SearchConfig:
    """The configuration of a file, overridden by the flags that were given; `ConfigError` names what is wrong.

    `distillation` are flags that override keys of the mapping of that name.
    """
    from_file = read_mapping(path, what="configuration", error=ConfigError) if path else {}
    given = {key: value for key, value in flags.items() if value is not None}
    if distil := {key: value for key, value in distillation.items() if value is not None}:
        of_file = from_file.get("distillation")
        given["distillation"] = {**of_file, **distil} if isinstance(of_file, dict) else distil
    for required in ("model", "dataset"):
        if required not in {**from_file, **given}:
            raise ConfigError(f"which {required}? give --{required} or a `{required}:` in the file of --config")
    source = str(path) if path and not _is_wrong_flag(given) else "command line"
    return validate(SearchConfig, {**from_file, **given}, source=source, error=ConfigError)


def _is_wrong_flag(given: Mapping[str, Any]) -> bool:
    """Whether the flags alone are invalid, so that a message blames the command line and not the file."""
    try:
        validate(SearchConfig, {"model": "-", "dataset": "-", **given}, source="", error=ConfigError)
    except ConfigError:
        return True
    return False
