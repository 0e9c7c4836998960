"""Settings that decide what the prompts are, shared by every document that names a dataset."""

from __future__ import annotations

from pydantic import Field, model_validator

from decoding.documents.strict_yaml import Document
from tuner.fields import PROBLEM, ChatTemplate, Dataset, SystemPrompt


class PromptSettings(Document):
    """Conversion of rows into prompts; each field is a key of the configuration and a flag of the same name."""

    preset: str | None = Field(
        None,
        description="Preset whose format to use, for a copy of its dataset; default: the dataset's, if it is a preset.",
        json_schema_extra={**PROBLEM, "metavar": "NAME"},
    )
    prompt_column: str | None = Field(
        None,
        description="Column that holds the prompt or the conversation; default: guessed.",
        json_schema_extra={**PROBLEM, "metavar": "COLUMN"},
    )
    template: str | None = Field(
        None,
        description="Format of a prompt, columns in braces, such as 'Question: {question}\\nAnswer:'.",
        json_schema_extra={**PROBLEM, "escapes": True},
    )
    shots: int | None = Field(
        None,
        ge=0,
        description="Solved examples before each prompt, with answers by the answer template; default: the preset's, or none.",
        json_schema_extra=PROBLEM,
    )
    answer_template: str | None = Field(
        None,
        description="Format of the answer of an example, which follows its prompt directly, such as ' {answer}'.",
        json_schema_extra={**PROBLEM, "escapes": True},
    )
    shots_dataset: str | None = Field(
        None,
        description="Dataset of the examples; default: the preset's, or the first rows of the dataset, which are then no prompts.",
        json_schema_extra={**PROBLEM, "metavar": "DATASET"},
    )
    system_prompt: SystemPrompt = None
    group_column: str | None = Field(
        None,
        description="Column of a group, such as a source file; no group is split between tuning and held-out prompts.",
        json_schema_extra={**PROBLEM, "metavar": "COLUMN"},
    )
    category_column: str | None = Field(
        None,
        description="Column of a prompt's category, for figures by category; default: category, task or subset, if there is one.",
        json_schema_extra={**PROBLEM, "metavar": "COLUMN"},
    )
    chat_template: ChatTemplate = True
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Cut longer prompts from the left; default: prompts that do not fit the context are left out.",
        json_schema_extra=PROBLEM,
    )

    @model_validator(mode="after")
    def _one_format(self) -> PromptSettings:
        if self.template is not None and self.prompt_column is not None:
            raise ValueError("prompt_column and template both say what a prompt is: give one of them")
        return self


class DatasetChoice(Document):
    """Dataset alone; a base of its own, so that it precedes the other settings."""

    dataset: Dataset


class DataSettings(PromptSettings, DatasetChoice):
    """Dataset and the conversion of its rows into prompts."""


DATA_FIELDS = tuple(DataSettings.model_fields)
"""Names of the settings, for commands that take them from a larger document."""
