"""Data sets on the command line: chat data out of the box, templates, examples, long prompts, and samples in dry runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests.support.commands import SearchCommand
from tests.support.refusals import refused
from tuner.cli.main import main
from tuner.cli.options import GroupedCommand, options_of, settings_from
from tuner.cli.terminal import LONGEST_SHOWN, shortened
from tuner.fields import DataSettings, PromptSettings

WORDS = [f"w{number}" for number in range(40)]


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def given(*arguments: str) -> DataSettings:
    made = []

    @click.command(cls=GroupedCommand)
    @options_of(DataSettings)
    def command(**flags: Any) -> None:
        made.append(settings_from(DataSettings, flags))

    result = CliRunner().invoke(command, ["--dataset", "d", *arguments])
    assert not result.exception, result.output
    return made[0]


@pytest.mark.parametrize("command", ["search", "bench", "distill", "export"])
def test_every_setting_of_the_prompts_is_a_flag_or_a_key(command: str) -> None:
    shown = " ".join(CliRunner().invoke(main, [command, "--help-all"]).stdout.split())
    for name in PromptSettings.model_fields:
        assert f"--{name.replace('_', '-')} " in shown or f" {name} " in shown, name


def test_flags_of_the_prompts_reach_the_settings() -> None:
    found = given(
        *("--template", r"Q: {q}\n\tA:", "--answer-template", r" {a}\\n", "--shots", "2", "--shots-dataset", "s"),
        *("--system-prompt", "Be\\n kind, \\d", "--max-prompt-tokens", "7", "--preset", "gsm8k", "--no-chat-template"),
    )
    assert (found.template, found.answer_template) == ("Q: {q}\n\tA:", " {a}\\n")
    assert (found.system_prompt, found.shots, found.shots_dataset) == ("Be\n kind, \\d", 2, "s")
    assert (found.max_prompt_tokens, found.preset, found.chat_template) == (7, "gsm8k", False)


def test_chat_data_is_searched_as_it_is(run_search: SearchCommand, workplace: Path) -> None:
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": "w3"}]
    rows = [
        {"messages": [{**turns[0], "content": f"{first} {second}"}, turns[1]], "file": str(number)}
        for number, (first, second) in enumerate(zip(WORDS, reversed(WORDS), strict=True))
    ]
    result = run_search("--dry-run", dataset=write(workplace.parent, rows))
    assert result.exit_code == 0, result.output
    assert "the conversations in the column 'messages'" in " ".join(result.stderr.split())
    assert "4 for tuning" in result.stdout
    assert "sample   row" in result.stdout


def test_template_examples_and_long_prompts(run_search: SearchCommand, workplace: Path) -> None:
    rows = [
        {"q": word if number % 2 else f"{word} " * 300, "a": "w1", "file": str(number)}
        for number, word in enumerate(WORDS)
    ]
    result = run_search(
        "--dry-run", dataset=write(workplace.parent, rows), template=r"w7 {q}\nw8", shots="1", answer_template=" {a}"
    )
    refused(result, "too few prompts")
    rows = [{**row, "q": row["q"] if number > 1 else f"w2{number}"} for number, row in enumerate(rows)]
    result = run_search(
        "--dry-run", dataset=write(workplace.parent, rows), template=r"w7 {q}\nw8", shots="1", answer_template=" {a}"
    )
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert (
        "prompts are too long and were left out, as at most 246 fit the model's context of 256 with 10 new ones" in told
    )
    assert "w7 w20 w8 w1" in " ".join(result.stdout.split())


def test_wrong_data_is_told_before_the_model_is_loaded(run_search: SearchCommand, workplace: Path) -> None:
    dataset = write(workplace.parent, [{"q": "w1", "file": "a"}])
    result = run_search(dataset=dataset, template="{question}")
    refused(result, "no column 'question'")
    assert "loading" not in result.stderr
    refused(run_search(dataset=dataset, template="{q", prompt_column="q"), "give one of them")


def test_long_samples_are_shortened() -> None:
    assert shortened("short") == "short"
    long = "a" * LONGEST_SHOWN + "b" * LONGEST_SHOWN
    assert shortened(long).splitlines()[1] == f"[... {LONGEST_SHOWN} characters ...]"
