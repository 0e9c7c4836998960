"""Prompts of chat data, templates and examples: what a row becomes, what is left out, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.support.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.support.reading import read_in_process
from tuner.errors import DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.datasets import load_preset
from tuner.inputs.formats import Turn, before_the_reply
from tuner.inputs.prompts import PromptSet, load_prompts

Row = dict[str, Any]
# As Gemma's and Mistral's templates do: no system turn, and the user's and the assistant's turns alternate.
STRICT_TEMPLATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
)


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def draw(
    path: Path, num_tuning: int = 1, num_held_out: int = 0, *, chat: str | None = CHAT_TEMPLATE, **options: Any
) -> PromptSet:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat
    context_length = options.pop("context_length", 4096)
    return load_prompts(
        str(path),
        tokenizer,
        num_tuning=num_tuning,
        num_held_out=num_held_out,
        max_new_tokens=16,
        context_length=context_length,
        seed=0,
        settings=PromptSettings(**options),
    )


def rendered(path: Path, **options: Any) -> str:
    """What the model reads for the only row."""
    tokenizer = byte_tokenizer()
    return str(tokenizer.decode(draw(path, **options).tuning[0].token_ids, skip_special_tokens=True))


def refusal(path: Path, *sizes: int, **options: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        draw(path, *(sizes or (1, 0)), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def messages(*turns: tuple[str, str]) -> Row:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def sharegpt(*turns: tuple[str, str]) -> Row:
    return {"id": "x", "conversations": [{"from": role, "value": content} for role, content in turns]}


class TestConversations:
    def test_the_last_reply_is_cut_off_and_all_before_goes_through_the_template(self, tmp_path: Path) -> None:
        row = messages(
            ("system", "Be brief."), ("user", "a"), ("assistant", "b"), ("user", "c {é}"), ("assistant", "d")
        )
        path = write(tmp_path / "a.jsonl", [row])
        assert rendered(path) == "[system] Be brief.[user] a[assistant] b[user] c {é}[assistant]"
        assert rendered(path, chat=None).startswith("System: Be brief.\n\nUser: a\n\nAssistant: b\n\nUser: c {é}")
        assert rendered(path, chat=None).endswith("\n\nAssistant:")

    def test_sharegpt(self, tmp_path: Path) -> None:
        row = sharegpt(("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
        path = write(tmp_path / "a.jsonl", [row])
        assert rendered(path) == "[system] s[user] a[assistant] b[user] c[assistant]"

    def test_a_column_can_be_named_and_a_conversation_goes_before_a_text(self, tmp_path: Path) -> None:
        row = {
            **messages(("user", "a"), ("assistant", "b")),
            "prompt": "text",
            "chat": [{"role": "user", "content": "c"}],
        }
        path = write(tmp_path / "a.jsonl", [row])
        assert rendered(path) == "[user] a[assistant]"
        assert rendered(path, prompt_column="chat") == "[user] c[assistant]"
        assert rendered(path, prompt_column="prompt") == "[user] text[assistant]"

    @pytest.mark.parametrize(
        ("roles", "kept"),
        [
            ("ua", "u"),
            ("u", "u"),
            ("suaua", "suau"),
            ("uau", "uau"),
            ("uaa", "u"),
            ("uata", "uat"),
            ("uuu", "u"),
            ("suu", "su"),
            ("uuau", "uuau"),
            ("a", ""),
            ("s", ""),
            ("", ""),
        ],
    )
    def test_where_a_prompt_ends(self, roles: str, kept: str) -> None:
        names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
        turns = [Turn(names[role], str(index)) for index, role in enumerate(roles)]
        assert before_the_reply(turns) == tuple(turns[: len(kept)])

    def test_images_and_calls_of_tools_are_left_out_and_counted(self, tmp_path: Path) -> None:
        image = [{"type": "image", "text": None, "url": "u"}, {"type": "text", "text": "what?", "url": None}]
        rows = [{"messages": [{"role": "user", "content": image}, None]}, *_images(image, 2)]
        assert "3 with images or calls of tools" in refusal(write(tmp_path / "a.jsonl", rows))
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
        user = {"role": "user", "content": "x", "tool_calls": None}
        rows = [{"messages": [user, call]}, {"messages": [{**user, "content": "y"}]}]
        found = draw(write(tmp_path / "b.jsonl", rows * 3))
        assert found.tuning[0].turns == (Turn("user", "y"),)
        calls = write(tmp_path / "c.jsonl", [sharegpt(("human", "a"), ("function_call", "f()"), ("observation", "1"))])
        assert "1 with images or calls of tools" in refusal(calls)

    def test_empty_and_equal_conversations_are_skipped(self, tmp_path: Path) -> None:
        rows = [messages(("user", " ")), messages(("assistant", "a")), messages(("user", "a"), ("assistant", "b"))]
        path = write(tmp_path / "a.jsonl", [*rows, messages(("user", "a"), ("assistant", "c"))])
        assert "1 for tuning and 0 held out (rows left out: 2 empty; 1 repeated)" in refusal(path, 1, 1)

    def test_what_the_template_refuses_is_left_out_and_counted(self, tmp_path: Path) -> None:
        rows = [messages(("assistant", "hello"), ("user", f"a{number}")) for number in range(6)]
        path = write(tmp_path / "a.jsonl", [*rows, messages(("user", "b"), ("assistant", "c"))])
        found = draw(path, chat=STRICT_TEMPLATE)
        assert [prompt.text for prompt in found.tuning] == ["User: b"]
        assert "6 refused by the chat template (roles must alternate)" in refusal(path, 1, 1, chat=STRICT_TEMPLATE)
        assert all("roles must alternate" in note for note in found.notes if "refused" in note)

    def test_the_split_keeps_groups_and_categories(self, tmp_path: Path) -> None:
        rows = [
            {**messages(("user", f"q{number}"), ("assistant", "a")), "thread": number % 4, "task": f"t{number % 2}"}
            for number in range(24)
        ]
        path = write(tmp_path / "a.jsonl", rows)
        found = draw(path, 6, 6, group_column="thread")
        assert not {p.row % 4 for p in found.tuning} & {p.row % 4 for p in found.held_out}
        assert all(prompt.category == f"t{prompt.row % 2}" for prompt in (*found.tuning, *found.held_out))
        assert found == draw(path, 6, 6, group_column="thread")

    def test_notes_say_what_a_prompt_is(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", [messages(("user", "a"))])
        assert draw(path).notes == ("prompts are the conversations in the column 'messages', up to the last reply",)
        assert "missing in the tokenizer: turns are written as 'User: ...'" in draw(path, chat=None).notes[1]
        assert "turned off" in draw(path, chat_template=False).notes[1]


def _images(content: list[dict[str, Any]], count: int) -> list[Row]:
    return [{"messages": [{"role": "user", "content": content}]} for _ in range(count)]


class TestSystemPrompt:
    def test_it_stands_before_a_text(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", [{"prompt": "p"}])
        assert rendered(path, system_prompt="s") == "[system] s[user] p[assistant]"
        assert rendered(path, system_prompt="s", chat=None) == "s\n\np"
        path = write(tmp_path / "b.jsonl", [messages(("system", "old"), ("user", "p"), ("assistant", "r"))])
        assert rendered(path, system_prompt="new") == "[system] new[user] p[assistant]"

    def test_a_template_without_system_turns_is_told_at_once(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", [{"prompt": "p"}])
        message = refusal(path, chat=STRICT_TEMPLATE, system_prompt="s")
        assert (
            "fails on a system prompt and one user turn: roles must alternate; put the text into --template" in message
        )


class TestLength:
    def test_too_long_prompts_are_left_out_with_a_count(self, tmp_path: Path) -> None:
        texts = ["x" * 500, *(f"short {number}" for number in range(5)), "y" * 500]
        path = write(tmp_path / "a.jsonl", [{"prompt": text} for text in texts])
        found = draw(path, 3, 2, context_length=300)
        assert all(prompt.text.startswith("short") for prompt in (*found.tuning, *found.held_out))
        (note,) = found.notes
        assert note.endswith(
            " too long, as at most 284 fit the model's context of 300 with 16 new ones; "
            "--set max_prompt_tokens=284 cuts them from the left"
        )
        assert draw(path, 3, 2).notes == ()

    def test_a_conversation_loses_its_earliest_turns(self, tmp_path: Path) -> None:
        row = messages(
            ("system", "s"), ("user", "a" * 50), ("assistant", "b" * 50), ("user", "c" * 50), ("assistant", "-")
        )
        path = write(tmp_path / "a.jsonl", [row])
        whole = rendered(path)
        assert rendered(path, max_prompt_tokens=len(whole) - 9) == whole.replace("a" * 50, "a" * 41)
        short = rendered(path, max_prompt_tokens=90)
        assert short == f"[system] s[user] {'c' * 50}[assistant]"
        assert rendered(path, max_prompt_tokens=50).startswith("[system] s[user] ccc")


class TestTemplates:
    def test_a_template_for_any_dataset(self, tmp_path: Path) -> None:
        rows = [{"frage": "Wie heißt „{x}“?", "texts": ["eins"], "more": {"de": "zwei"}}]
        path = write(tmp_path / "a.jsonl", rows)
        written = "Q: {frage} {{}} {texts[0]} {more[de]}\nA:"
        found = draw(path, template=written)
        assert found.tuning[0].text == "Q: Wie heißt „{x}“? {} eins zwei\nA:"

    @pytest.mark.parametrize(
        ("written", "told"),
        [
            ("Q: {question}", "no column 'question'; valid: n, prompt"),
            ("Q: {prompt", "template: expected '}' before end of string; write {{ and }} for braces"),
            ("Q: prompt", "names no column"),
            ("{prompt!r}", "takes no format and no conversion"),
            ("{prompt.__class__}", "no column 'prompt.__class__'"),
            ("{n}", "holds int, not text"),
        ],
    )
    def test_wrong_templates(self, written: str, told: str, tmp_path: Path) -> None:
        path = write(tmp_path / "a.jsonl", [{"prompt": "p", "n": 1}])
        assert told in refusal(path, template=written)


class TestShots:
    def test_a_local_copy_of_a_preset(self, tmp_path: Path) -> None:
        rows = [{"question": f"{number}?", "answer": f"{number}!"} for number in range(8)]
        path = write(tmp_path / "a.jsonl", rows)
        text = draw(path, preset="gsm8k_5shot").tuning[0].text
        assert text.startswith("Q: 0?\nA: 0!\n\nQ: 1?\nA: 1!\n\n")
        assert text.count("Q: ") == 6
        assert "has only 3 rows with prompt and answer, and the preset needs 5" in refusal(
            write(tmp_path / "few.jsonl", rows[:3]), preset="gsm8k_5shot"
        )
        assert "5 repeated" in refusal(path, 4, 0, preset="gsm8k_5shot"), "an example is no prompt"
        assert draw(path, preset="gsm8k_5shot", template="{question}!").tuning[0].text.count("?!") == 1
        assert "did you mean 'gsm8k'" in refusal(path, preset="gsm8")

    def test_the_split_of_the_examples_is_the_presets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "hub").mkdir()
        write(tmp_path / "hub" / "test.jsonl", [{"question": "9?", "answer": "-"}])
        write(tmp_path / "hub" / "train.jsonl", [{"question": f"{number}?", "answer": "!"} for number in range(6)])
        local = load_preset("gsm8k_5shot").model_copy(update={"dataset": str(tmp_path / "hub"), "config": None})
        monkeypatch.setattr("tuner.inputs.datasets.load_preset", lambda _: local)
        assert draw(Path("gsm8k_5shot")).tuning[0].text.startswith("Q: 0?\nA: !\n\n")


class TestBenchmarks:
    def test_spec_bench_from_a_file(self, tmp_path: Path) -> None:
        rows = [
            {"question_id": 81, "category": "writing", "turns": ["Write.", "More."]},
            {"question_id": 161, "category": "translation", "turns": ["Translate."]},
            {"question_id": 281, "category": "stem", "turns": ["Explain.", "More."]},
            {"question_id": 401, "category": "rag", "turns": ["Find."]},
        ]
        found = draw(write(tmp_path / "question.jsonl", rows), 4, 0, preset="spec_bench")
        named = {prompt.row: prompt.category for prompt in found.tuning}
        assert named == {0: "mt_bench", 1: "translation", 2: "mt_bench", 3: "rag"}

    def test_spec_bench_is_read_from_its_repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load_dataset(builder: str, *, data_files: dict[str, str], split: str) -> datasets.Dataset:
            asked.append((builder, data_files, split))
            return datasets.Dataset.from_dict({"turns": [["First.", "Second."]], "category": ["math"]})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        read_in_process(monkeypatch)
        assert draw(Path("spec_bench")).tuning[0].category == "mt_bench"
        address = load_preset("spec_bench").dataset
        assert asked == [("json", {"test": address}, "test")]
        assert address.endswith("/data/spec_bench/question.jsonl")

    def test_an_address_that_cannot_be_read_leads_to_a_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*_: Any, **__: Any) -> None:
            raise ConnectionError("no route")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        read_in_process(monkeypatch)
        assert "no route; a copy on this machine is read by --dataset FILE --set preset=spec_bench" in refusal(
            Path("spec_bench")
        )

    def test_placeholders_of_speed_bench_are_refused(self, tmp_path: Path) -> None:
        text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
        message = refusal(write(tmp_path / "a.jsonl", [{"turns": [text], "category": "coding"}]))
        assert "row 0 of the dataset" in message
        assert "prepare.py" in message
        assert "qualitative.jsonl" in message

    def test_humaneval_from_its_compressed_file(self, tmp_path: Path) -> None:
        row = {"task_id": "HumanEval/0", "prompt": "def {f}():\n", "canonical_solution": "    x", "test": ""}
        path = tmp_path / "HumanEval.jsonl.gz"
        path.write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))
        assert draw(path, preset="humaneval", chat_template=False).tuning[0].text == "def {f}():\n"
        assert draw(path).tuning[0].category is None
