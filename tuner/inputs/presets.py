"""Presets of well-known datasets: where they are, and how their rows become prompts and examples.

Each is a YAML file in `configs/datasets`.
"""

from __future__ import annotations

from importlib import resources
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from decoding.documents.strict_yaml import Document, read_mapping, suggest, validate
from tuner.errors import DatasetError
from tuner.inputs.formats import Template


def _parsable(written: str) -> str:
    Template.parse(written)
    return written


Written = Annotated[str, AfterValidator(_parsable)]


class Preset(Document):
    """Well-known dataset: its source, and the templates of its prompts and of the answers in examples."""

    description: str
    dataset: str = Field(description="hub id, address of a data file, or a folder laid out like a hub dataset")
    config: str | None = None
    revision: str | None = Field(None, description="branch or commit on the hub")
    split: str
    template: Written | None = None
    short_template: Written | None = Field(
        None, description="template for rows in which a column of `template` is blank; without it such rows are skipped"
    )
    turns: tuple[Written, ...] = Field(
        (),
        description="in place of `template`: a conversation, whose turns are the user's and the assistant's alternately",
    )
    answer_template: Written | None = Field(
        None, description="format of the answer of an example, after its prompt; there are `shots` before each prompt"
    )
    answer_on_one_line: bool = Field(
        False, description="remove the line breaks of answers, as the authors of a prompt do"
    )
    shots: int = Field(0, ge=0, description="solved examples before each prompt")
    shots_split: str | None = Field(None, description="split of the examples; default: the first rows of the dataset")
    shots_separator: str = Field("\n\n", description="text between two examples, and before the prompt")
    category_column: str | None = None
    categories: dict[str, str] = Field(
        default_factory=dict, description="names under which values of the category column are reported"
    )

    @property
    def templates(self) -> tuple[Template, ...]:
        """Templates of a prompt, first match first; none if the preset makes conversations."""
        return tuple(Template.parse(written) for written in (self.template, self.short_template) if written)

    @property
    def turn_templates(self) -> tuple[Template, ...]:
        """Templates of the turns of a conversation; none if the preset makes single texts."""
        return tuple(Template.parse(written) for written in self.turns)

    @model_validator(mode="after")
    def _is_text_or_conversation(self) -> Preset:
        if (self.template is None) != bool(self.turns) or (self.turns and len(self.turns) % 2 == 0):
            raise ValueError(
                "a preset has either a template or an odd number of turns, the last of which is the user's"
            )
        if bool(self.shots) != (self.answer_template is not None) or (self.shots and self.turns):
            raise ValueError("shots need an answer_template, which is for shots only, and texts")
        return self


def preset_names() -> list[str]:
    files = resources.files("configs.datasets").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    """Return the preset `name`; raise `DatasetError` if it is missing or invalid."""
    if name not in preset_names():
        raise DatasetError(f"no such preset {name!r}; {suggest(name, preset_names())}")
    with resources.as_file(resources.files("configs.datasets") / f"{name}.yaml") as path:
        data = read_mapping(path, what="preset", error=DatasetError)
    return validate(Preset, data, source=f"preset {name}", error=DatasetError)
