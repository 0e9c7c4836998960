"""Options derived from documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner
from pydantic import Field

from decoding.documents.strict_yaml import Document, Duration
from tuner.cli.options import GroupedCommand, keys_of, options_of, settings_from
from tuner.fields import Names


class Inner(Document):
    number: int = 0


class Settings(Document):
    name: str = Field(description="Name of the thing.", json_schema_extra={"group": "Problem", "metavar": "NAME"})
    kind: Literal["a", "b"] = Field("a", description="Kind of the thing.")
    count: int | None = Field(None, ge=2, description="How many.")
    share: float = Field(0.5, gt=0, le=1, description="Share.")
    budget: Duration | None = Field(None, description="Time.")
    limit: Duration = Field(5.0, description="Another time.")
    names: Names = Field((), description="Names.")
    sizes: tuple[int, ...] = Field((1, 2), description="Sizes.")
    quiet: bool = Field(False, description="Say less.")
    careful: bool = Field(True, description="Check more.")
    out: Path = Field(Path("here"), description="Folder.")
    inner: Inner = Field(default_factory=Inner, description="Has no flag.")
    others: dict[str, Any] = Field(default_factory=dict, description="Has no flag.")


def run(*arguments: str) -> tuple[Settings | None, str]:
    """Return the document that the arguments make, or None, and the output."""
    made: list[Settings] = []

    @click.command(cls=GroupedCommand)
    @options_of(Settings)
    def command(**flags: Any) -> None:
        made.append(settings_from(Settings, flags))

    output = CliRunner().invoke(command, arguments, standalone_mode=True).output
    return (made[0] if made else None), output


def test_flags_that_are_not_given_leave_defaults() -> None:
    assert run("--name", "n")[0] == Settings(name="n")


def test_flags_become_values_of_their_types() -> None:
    arguments = (
        "--name n --kind b --count 3 --share 1 --budget 2m --limit 90s --names a,b --names c --sizes 4 --sizes 5"
    )
    found, output = run(*arguments.split(), "--quiet", "--no-careful", "--out", "there")
    assert found == Settings(
        name="n",
        kind="b",
        count=3,
        share=1.0,
        budget=120.0,
        limit=90.0,
        names=("a", "b", "c"),
        sizes=(4, 5),
        quiet=True,
        careful=False,
        out=Path("there"),
    ), output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing option '--name'"),
        ("--name n --kind c", "Invalid value for '--kind'"),
        ("--name n --count 1", "Invalid value for '--count': 1 is not in the range x>=2"),
        ("--name n --share 0", "Invalid value for '--share'"),
        ("--name n --inner 3", "No such option '--inner'"),
        ("--name n --others 3", "No such option '--others'"),
    ],
)
def test_wrong_flags_are_refused_by_name(arguments: str, message: str) -> None:
    found, output = run(*arguments.split())
    assert found is None
    assert message in " ".join(output.replace("│", " ").split()), output


def test_help_shows_description_default_and_group() -> None:
    shown = run("--help")[1]
    words = " ".join(shown.split())
    assert "--name NAME Name of the thing. [required]" in words
    assert "--share X Share. [default: 0.5]" in words
    assert "--sizes N Sizes. [default: 1, 2]" in words
    assert "--careful / --no-careful Check more. [default: yes]" in words
    assert "--quiet Say less. --" in words.replace("--careful", "--"), "a switch that is off shows no default"
    assert shown.index("Problem:") < shown.index("Options:\n  --kind")


def test_a_type_that_no_option_can_hold_is_refused() -> None:
    class Wrong(Document):
        pair: set[int]

    with pytest.raises(TypeError, match="no option can hold the field 'pair'"):
        options_of(Wrong)


class Keyed(Document):
    model: str = Field(description="The model.")
    text: str | None = Field(None, description="Text.", json_schema_extra={"escapes": True})
    kind: Literal["a", "b"] = Field("a", description="Kind.")
    out: Path = Field(Path("here"), description="Folder.")
    names: Names = Field((), description="Names.")
    limit: Duration | None = Field(None, description="Time.")
    is_careful: bool = Field(True, description="Check more.")
    inner: Inner = Field(default_factory=Inner, description="Numbers.")
    others: dict[str, Any] = Field(default_factory=dict, description="Anything.")


def keyed(*arguments: str) -> tuple[Keyed | None, str]:
    """Return the document that the arguments of a command with two flags make, or None, and the output."""
    made: list[Keyed] = []

    @click.command(cls=GroupedCommand)
    @keys_of(Keyed)
    @options_of(Keyed, only=["kind"], positions=("model",))
    def command(**flags: Any) -> None:
        made.append(settings_from(Keyed, flags))

    result = CliRunner().invoke(command, arguments)
    return (made[0] if made else None), result.output + str(result.exception or "")


@pytest.mark.parametrize(
    ("assigned", "expected"),
    [
        ("text=5", {"text": "5"}),
        ("text=Q: {q}\\nA=1", {"text": "Q: {q}\nA=1"}),
        ("out=2026", {"out": Path("2026")}),
        ("names=a,b", {"names": ("a", "b")}),
        ("limit=2m", {"limit": 120.0}),
        ("limit=null", {"limit": None}),
        ("is_careful=no", {"is_careful": False}),
        ("inner.number=3", {"inner": Inner(number=3)}),
        ("others.a.b=3", {"others": {"a": {"b": 3}}}),
    ],
)
def test_set_gives_a_key_its_value(assigned: str, expected: dict[str, Any]) -> None:
    assert keyed("m", "--set", assigned)[0] == Keyed(model="m", **expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "nams=a"], "unknown key 'nams'; did you mean 'names'"),
        (["--set", "inner.numbr=3"], "unknown key 'inner.numbr'; did you mean 'number'"),
        (["--set", "inner.number=three"], "inner.number: input should be a valid integer"),
        (["--set", "names"], "--set names: give KEY=VALUE"),
        (["--set", "inner..number=1"], "give KEY=VALUE"),
        (["--set", "limit=[1"], "--set limit: '[1' is not valid YAML"),
        (["--set", "limit=1", "--set", "limit=2"], "limit is given twice"),
        (["--set", "inner.number=1", "--set", "inner=2"], "inner is given twice"),
        (["--kind", "a", "--set", "kind=b"], "kind is given twice"),
        (["--set", "model=other"], "model is given twice"),
        (["--model", "other"], "model is given twice: 'm' and --model 'other'"),
        (["--names", "a"], "No such option '--names'. Give --set names=VALUE."),
        (["--no-is-careful"], "No such option '--no-is-careful'. Give --set is_careful=VALUE."),
        (["--kin", "a"], "Did you mean"),
    ],
)
def test_wrong_keys_are_refused_by_name(arguments: list[str], message: str) -> None:
    found, output = keyed("m", *arguments)
    assert found is None
    assert message in " ".join(output.split()), output


def test_what_has_a_position_may_be_given_by_its_flag() -> None:
    assert keyed("--model", "m")[0] == keyed("m")[0] == Keyed(model="m")
    assert "Missing argument 'MODEL'" in keyed()[1]


def test_the_long_help_lists_the_keys_without_a_flag() -> None:
    assert "inner.number" not in keyed("--help")[1]
    shown = " ".join(keyed("--help-all")[1].split("Keys of")[1].split())
    assert "limit Time." in shown
    assert "is_careful Check more. [default: yes]" in shown
    assert "inner.number" in shown
    assert "kind" not in shown
