"""The contract of an evaluation: a document of settings, and a method that runs it.

`sdtune evaluate NAME` takes its help from the docstring of the class and its options from the fields. The module of the
class is imported for `--help`, so everything heavy is imported inside `run`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from decoding.documents.strict_yaml import Document
from tuner.config import SearchConfig
from tuner.fields import DATA_FIELDS, OUTPUTS, Extra, Threads

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.progress import Progress

EVALUATION: Extra = {"group": "Evaluation"}

LongestDraft = Annotated[
    int, Field(ge=1, le=64, description="Longest draft (K), in tokens.", json_schema_extra=EVALUATION)
]
ResultsFile = Annotated[
    Path | None,
    Field(
        description="JSON file of all figures and samples; default: none.",
        json_schema_extra={**OUTPUTS, "metavar": "FILE"},
    ),
]
ResultsFolder = Annotated[
    Path, Field(description="Folder of the results.", json_schema_extra={**OUTPUTS, "metavar": "DIR"})
]
SEARCH_KEYS = (
    "model",
    "revision",
    *DATA_FIELDS,
    "tuning_prompts",
    "held_out_prompts",
    "max_new_tokens",
    "seed",
    "temperature",
    "dtype",
    "device",
    "runner",
    "exact",
    "exact_width",
    "prefix_reuse",
    "heads",
)
"""Settings of a search that an evaluation on its problem takes as flags too."""


@dataclass(frozen=True)
class Report:
    """What an evaluation shows at its end."""

    shown: RenderableType
    width: int = 110
    """Columns that the tables need at least."""
    succeeded: bool = True


class Evaluation(Document):
    """Settings of an evaluation. Subclasses name their fields and implement `run`."""

    search_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of `SearchConfig` that are flags as well; the evaluation then has a field `config`."""
    is_resumable: ClassVar[bool] = False
    """True if the same command goes on after Ctrl-C."""

    threads: Threads = None

    @property
    def num_threads(self) -> int | None:
        """CPU threads of torch, or None for torch's own number."""
        return self.threads

    @property
    def results(self) -> Path | None:
        """Where results are written, or None if they are only shown."""
        return getattr(self, "out", None)

    @abstractmethod
    def run(self, progress: Progress) -> Report:
        """Do the work, write the results, and return what to show. Raises `SdtuneError` for errors of the user."""


class SearchEvaluation(Evaluation):
    """Settings of an evaluation that works on the problem of a search: the same model, prompts and exit heads."""

    search_keys: ClassVar[tuple[str, ...]] = SEARCH_KEYS

    config: SearchConfig

    @property
    def num_threads(self) -> int | None:
        """CPU threads of torch: the flag, or else the configuration's."""
        return self.threads or self.config.threads
