"""Data sets on the command line: chat data out of the box, templates, examples, long prompts, and samples in dry runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from tests.support.commands import SearchCommand
from tests.support.refusals import refused
from tuner.cli.options import GroupedCommand, options_of, settings_from
from tuner.fields import DataSettings


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


def test_flags_of_the_prompts_reach_the_settings() -> None:
    found = given(
        *("--template", r"Q: {q}\n\tA:"),
        *("--system-prompt", "Be\\n kind, \\d", "--max-prompt-tokens", "7", "--preset", "gsm8k", "--no-chat-template"),
    )
    assert (found.template, found.system_prompt) == ("Q: {q}\n\tA:", "Be\n kind, \\d")
    assert (found.max_prompt_tokens, found.preset, found.chat_template) == (7, "gsm8k", False)


def test_chat_data_is_searched_as_it_is(run_search: SearchCommand, workplace: Path) -> None:
    reply, long = {"role": "assistant", "content": "w3"}, {"role": "user", "content": "w1 " * 300}
    asked = [{"role": "user", "content": f"w{number} w{40 - number}"} for number in range(40)]
    rows = [{"messages": [turn, reply], "file": str(number)} for number, turn in enumerate([*asked, *[long] * 20])]
    result = run_search("--dry-run", dataset=write(workplace.parent, rows))
    assert result.exit_code == 0, result.output
    told = " ".join(result.stderr.split())
    assert "the conversations in the column 'messages'" in told
    assert "too long, as at most 246 fit the model's context of 256 with 10 new ones" in told
    assert "4 for tuning" in result.stdout
    assert "sample   row" in result.stdout


def test_wrong_data_is_told_before_the_model_is_loaded(run_search: SearchCommand, workplace: Path) -> None:
    dataset = write(workplace.parent, [{"q": "w1", "file": "a"}])
    result = run_search(dataset=dataset, template="{question}")
    refused(result, "no column 'question'")
    assert "loading" not in result.stderr
    refused(run_search(dataset=dataset, template="{q", prompt_column="q"), "give one of them")
