"""The document of a choice between the stages of a cascade, round by round."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from decoding.documents.strict_yaml import Document

Price = Annotated[float, Field(ge=0.0, le=64.0, allow_inf_nan=False)]


class StageChoice(Document):
    """Settings of `decoding.drafters.chooser`: the stage that opens a round is the one that has paid in this sequence."""

    prices: tuple[Price, ...] = Field(
        min_length=2,
        description="for each stage, the cost of a drafted token and its verification, in plain passes; a round costs one more",
    )
    forgetting: float = Field(
        0.9, ge=0.5, le=1.0, description="share of a stage's evidence kept after each round that shows its worth"
    )
    start: float = Field(
        2.0,
        gt=1.0,
        le=64.0,
        description="tokens per plain pass expected of a stage that was not tried; counts as one round",
    )
    margin: float = Field(
        1.5,
        ge=1.0,
        le=64.0,
        description="how many times as much a later stage must have paid to open instead of an earlier one",
    )


# Left out of a document without a choice: stages then open rounds in their order.
Choice = Annotated[
    StageChoice | None,
    Field(
        exclude_if=lambda choice: choice is None,
        description="choice of the stage that opens a round by what has paid in this sequence; default: the first that can",
    ),
]


def describe_choice(choice: StageChoice | None) -> str:
    """Return the words that a choice adds to the phrase of its stages."""
    return "" if choice is None else " where it pays"


def choice_columns(choice: dict[str, Any] | None) -> dict[str, Any]:
    """Return the columns of a choice in the table of trials, from its plain data; none without one."""
    if choice is None:
        return {}
    shown = {**choice, "prices": " ".join(f"{price:g}" for price in choice["prices"])}
    return {f"choice.{key}": value for key, value in shown.items()}
