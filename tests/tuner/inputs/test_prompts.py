"""Prompts from every kind of source: drawing, grouping, cutting, refusals. All sources are local; the hub is offline."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.byte_tokenizer import BOS, CHAT_TEMPLATE, byte_tokenizer
from tests.support.reading import read_in_process
from tuner.errors import DatasetError
from tuner.fields import PromptSettings
from tuner.inputs.datasets import Preset, load_preset, open_table, preset_names
from tuner.inputs.encoding import PromptEncoder, encode_prompt
from tuner.inputs.formats import Content
from tuner.inputs.prompts import PromptSet, load_prompts

WORDS = [f"prompt number {number}" for number in range(20)]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: a beginning-of-sequence token, then one token per byte."""
    return byte_tokenizer()


def load(source: Path | str, tokenizer: Any, num_tuning: int = 2, num_held_out: int = 2, **options: Any) -> PromptSet:
    defaults: dict[str, Any] = {"max_new_tokens": 16, "context_length": 512, "seed": 0}
    settings = PromptSettings(**{name: options.pop(name) for name in PromptSettings.model_fields if name in options})
    sizes = {"num_tuning": num_tuning, "num_held_out": num_held_out}
    return load_prompts(str(source), tokenizer, **sizes, **{**defaults, **options}, settings=settings)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts_file(folder: Path, prompts: list[str] = WORDS) -> Path:
    return write_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])


def texts(prompts: PromptSet) -> list[str]:
    return [prompt.text for prompt in (*prompts.tuning, *prompts.held_out)]


def refusal(source: Path | str, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        load(source, tokenizer, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestFiles:
    @pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "txt", "JSONL"])
    def test_every_kind(self, kind: str, tmp_path: Path, tokenizer: Any) -> None:
        path = tmp_path / f"prompts.{kind}"
        rows = datasets.Dataset.from_dict({"id": list(range(20)), "prompt": WORDS})
        if kind == "parquet":
            rows.to_parquet(path)
        elif kind == "csv":
            rows.to_csv(path)
        elif kind == "json":
            path.write_text(json.dumps(rows.to_list(), indent=1))
        elif kind == "txt":
            path.write_text("\n".join(WORDS) + "\n")
        else:
            write_jsonl(path, rows.to_list())
        prompts = load(path, tokenizer, num_tuning=12, num_held_out=8)
        assert sorted(texts(prompts)) == sorted(WORDS)
        assert all(WORDS[prompt.row] == prompt.text for prompt in (*prompts.tuning, *prompts.held_out))
        assert prompts.name == str(path)

    def test_blank_lines_separate_prompts_of_a_text_file(self, tmp_path: Path, tokenizer: Any) -> None:
        (path := tmp_path / "prompts.txt").write_text(
            "\n\n  first\nline two\n \t\n\nsecond\n\n\nthird\n\n", "utf-8-sig"
        )
        assert sorted(texts(load(path, tokenizer, 2, 1))) == ["  first\nline two", "second", "third"]

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "cannot read the dataset file"),
            ("a.jsonl", bytes(range(256)) * 8, "begins with"),
            ("a.csv", bytes(range(128, 256)) * 8, "cannot read the dataset file"),
            ("a.parquet", b"PAR1 is not enough", "cannot read the dataset file"),
            ("a.txt", b"\xff\xfe\x00", "cannot read the dataset file"),
            ("a.jsonl", b"", "is empty"),
            ("a.jsonl", b'null\n{"prompt": "a"}\n', "begins with 'null'"),
            ("a.xml", b"<a/>", "valid: .csv, .json, .jsonl, .parquet, .txt"),
        ],
    )
    def test_damaged(
        self,
        name: str,
        content: bytes,
        expected: str,
        tmp_path: Path,
        tokenizer: Any,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        (path := tmp_path / name).write_bytes(content)
        message = refusal(path, tokenizer)
        assert expected in message
        assert str(path) in message
        assert capfd.readouterr() == ("", "")

    def test_a_file_has_no_split(self, tmp_path: Path, tokenizer: Any) -> None:
        assert "no splits" in refusal(f"{prompts_file(tmp_path)}@test", tokenizer)


class TestFolders:
    def test_saved_dataset(self, tmp_path: Path, tokenizer: Any) -> None:
        datasets.Dataset.from_dict({"prompt": WORDS}).save_to_disk(folder := tmp_path / "saved")
        assert len(texts(load(folder, tokenizer))) == 4
        assert "without splits" in refusal(f"{folder}@test", tokenizer)
        assert "no configs" in refusal(f"{folder}:main", tokenizer)

    def test_saved_splits(self, tmp_path: Path, tokenizer: Any) -> None:
        parts = {split: datasets.Dataset.from_dict({"prompt": [f"{split} {word}" for word in WORDS]}) for split in "ab"}
        datasets.DatasetDict(parts).save_to_disk(folder := tmp_path / "saved")
        table = open_table(f"{folder}@b")
        assert table.name == f"{folder}@b"
        assert all(text.startswith("b ") for text in table.values("prompt"))
        assert "valid: a, b" in refusal(f"{folder}@c", tokenizer)
        assert "several splits" in refusal(folder, tokenizer)
        datasets.DatasetDict().save_to_disk(tmp_path / "none")
        assert "no splits" in refusal(tmp_path / "none", tokenizer)

    def test_the_default_split_is_test(self, tmp_path: Path, tokenizer: Any) -> None:
        for split in ("train", "test"):
            write_jsonl(tmp_path / f"{split}.jsonl", [{"prompt": f"{split} {word}"} for word in WORDS])
        prompts = load(tmp_path, tokenizer)
        assert prompts.name == f"{tmp_path}@test"
        assert all(text.startswith("test ") for text in texts(prompts))

    def test_data_files_with_configs(self, tmp_path: Path, tokenizer: Any) -> None:
        folder = hub_folder(
            tmp_path / "owner" / "name", {"main": ["test", "train"], "other": ["test"]}, {"text": WORDS}
        )
        assert load(f"{folder}:main@train", tokenizer).name == f"{folder}:main@train"
        assert load(f"{folder}:other", tokenizer).name == f"{folder}:other@test"
        assert len(texts(load(f"{folder}:main@test[:4]", tokenizer))) == 4
        assert "has several configs: name one as" in refusal(folder, tokenizer)
        assert "did you mean 'main'? valid: main, other" in refusal(f"{folder}:mian", tokenizer)
        assert "['test', 'train']" in refusal(f"{folder}:main@validation", tokenizer)

    def test_damaged(self, tmp_path: Path, tokenizer: Any) -> None:
        datasets.Dataset.from_dict({"prompt": WORDS}).save_to_disk(folder := tmp_path / "saved")
        arrow = next(folder.glob("*.arrow"))
        arrow.write_bytes(arrow.read_bytes()[:300])
        assert f"cannot read the dataset folder {folder}" in refusal(folder, tokenizer)
        (empty := tmp_path / "empty").mkdir()
        assert "holds no data files (.csv" in refusal(empty, tokenizer)


def hub_folder(folder: Path, configs: dict[str, list[str]], columns: dict[str, Any]) -> Path:
    """Write a folder laid out like a hub dataset, with its configs in the README's header."""
    listed = []
    for config, splits in configs.items():
        (folder / config).mkdir(parents=True)
        for split in splits:
            datasets.Dataset.from_dict(columns).to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
        files = [{"split": split, "path": f"{config}/{split}-*"} for split in splits]
        listed.append({"config_name": config, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(listed)}\n---\n")
    return folder


class TestHub:
    def test_offline(self, tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
        message = refusal("no/such:config@split", tokenizer)
        assert "cannot read the hub dataset" in message
        assert "Couldn't reach" in message
        assert capfd.readouterr() == ("", "")

    def test_config_split_and_revision_reach_the_hub(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def load_dataset(source: str, config: str | None, **options: Any) -> datasets.Dataset:
            asked.append((source, config, options["split"], options["revision"]))
            return datasets.Dataset.from_dict({"text": WORDS, "document": WORDS})

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        read_in_process(monkeypatch)
        assert (
            load("owner/na.me:3.0.0@train[:10%]", tokenizer, prompt_column="text").name
            == "owner/na.me:3.0.0@train[:10%]"
        )
        assert load("xsum@train", tokenizer).name == "xsum@train"
        assert asked == [
            ("owner/na.me", "3.0.0", "train[:10%]", None),
            ("EdinburghNLP/xsum", None, "train", "refs/convert/parquet"),
        ]

    @pytest.mark.parametrize("source", ["gsm8", "no/such/place", "data/missing.jsonl", " ", "x" * 5000])
    def test_no_such_dataset(self, source: str, tokenizer: Any) -> None:
        assert f"no such dataset {source!r}" in refusal(source, tokenizer)


ALPACA_INTRO = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a response that "
    "appropriately completes the request.\n\n"
)
BARE_INTRO = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
WMT = ({"translation": {"de": "Hallo.", "en": "Hello."}}, "Translate from German to English.\nGerman: Hallo.\nEnglish:")
GSM8K = {"question": "1 + 1?", "answer": "It is 2.\n#### 2"}
CNN = {"article": "News.", "highlights": "First .\nSecond .", "id": "0"}
MT_BENCH = {
    "prompt": ["First.", "Second."],
    "prompt_id": 1,
    "category": "math",
    "reference": ["The answer.", "Another."],
}
PRESET_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "alpaca": (
        {"instruction": "Sort.", "input": "3 1", "output": "1 3", "text": "x"},
        f"{ALPACA_INTRO}### Instruction:\nSort.\n\n### Input:\n3 1\n\n### Response:",
    ),
    "alpaca_bare": ({"instruction": "Name it.", "input": "", "output": "x", "text": "x"}, "Name it."),
    "cnn_dailymail": (CNN, "Article: News.\n\nSummarize the article above in a few sentences.\nSummary:"),
    "cnn_dailymail_1shot": (
        CNN,
        "Article: example 0 News.\nSummary: First .Second .\nArticle: News.\nSummary:",
    ),
    "dolly": (
        {"instruction": "Who?", "context": "Ada was first.", "response": "Ada.", "category": "closed_qa"},
        f"{BARE_INTRO}### Instruction:\nWho?\n\nInput:\nAda was first.\n\n### Response:",
    ),
    "dolly_bare": (
        {"instruction": "Who?", "context": "Ada was first.", "response": "Ada.", "category": "closed_qa"},
        "Who?\n\nAda was first.",
    ),
    "gsm8k": (GSM8K, "Question: 1 + 1?\nAnswer:"),
    "gsm8k_5shot": (
        GSM8K,
        "".join(f"Q: example {number} 1 + 1?\nA: It is 2.\n#### 2\n\n" for number in range(5)) + "Q: 1 + 1?\nA:",
    ),
    "humaneval": (
        {"task_id": "0", "prompt": "def {f}():\n    ", "canonical_solution": "x", "test": "x"},
        "def {f}():\n    ",
    ),
    "mt_bench": (MT_BENCH, "First."),
    "mt_bench_turn2": (MT_BENCH, "User: First.\n\nAssistant: The answer.\n\nUser: Second."),
    "spec_bench": ({"question_id": 81, "category": "writing", "turns": ["First.", "Second."]}, "First."),
    "speed_bench": (
        {"question_id": "0", "category": "coding", "sub_category": "x", "turns": ["First."], "multiturn": False},
        "First.",
    ),
    "wmt14-de-en": WMT,
    "wmt19-de-en": WMT,
    "xsum": (
        {"document": "News.", "summary": "x", "id": "0"},
        "Article: News.\n\nSummarize the article above in one sentence.\nSummary:",
    ),
}
"""Columns that tell the examples of the presets with shots apart."""


def solved(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a row of the same kind, told apart by its question."""
    return {
        name: f"example {number} {value}" if name in ("question", "article") else value for name, value in row.items()
    }


class TestPresets:
    def test_every_preset_makes_its_prompt_of_a_row(self, tmp_path: Path, tokenizer: Any) -> None:
        assert preset_names() == sorted(PRESET_ROWS)
        for name, (row, prompt) in PRESET_ROWS.items():
            examples = [solved(row, number) for number in range(load_preset(name).shots)]
            path = write_jsonl(tmp_path / f"{name}.jsonl", [*examples, row])
            assert texts(load(path, tokenizer, 1, 0, preset=name, context_length=4096)) == [prompt], name

    @pytest.mark.parametrize(
        "wrong",
        [
            {"template": "{question"},
            {"template": "{question!r}"},
            {"template": None, "turns": ["{question}", "{answer}"]},
            {"shots": 1},
            {"answer_template": "{answer}"},
            {"temlate": "{question}"},
        ],
    )
    def test_invalid_presets_are_refused(self, wrong: dict[str, Any]) -> None:
        right = {"description": "-", "dataset": "-", "split": "-", "template": "{question}"}
        Preset.model_validate(right)
        with pytest.raises(ValueError, match=r"template|temlate|turns"):
            Preset.model_validate({**right, **wrong})


class TestColumns:
    def test_guessed(self, tmp_path: Path, tokenizer: Any) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "question": word} for word in WORDS])
        assert set(texts(load(path, tokenizer))) <= set(WORDS)

    def test_not_guessed(self, tmp_path: Path, tokenizer: Any) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"code": word, "id": word} for word in WORDS])
        assert "columns: code, id" in refusal(path, tokenizer)
        path = write_jsonl(tmp_path / "b.jsonl", [{"instruction": word, "input": word} for word in WORDS])
        assert "'instruction' and 'input'" in refusal(path, tokenizer)

    def test_named(self, tmp_path: Path, tokenizer: Any) -> None:
        rows = [{"prompt": "no", "a.b[0]": word, "turns": [word, "no"], "pair": {"de": word}} for word in WORDS]
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        for column in ("a.b[0]", "turns[0]", "pair[de]"):
            assert set(texts(load(path, tokenizer, prompt_column=column))) <= set(WORDS)

    def test_named_wrongly(self, tmp_path: Path, tokenizer: Any) -> None:
        path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": ["a"], "pair": {"de": "x"}, "id": 1}])
        assert "no column 'promt'; did you mean 'prompt'? valid: id, pair, prompt" in refusal(
            path, tokenizer, prompt_column="promt"
        )
        assert "row 0" in (message := refusal(path, tokenizer))
        assert "such as prompt[0]" in message
        assert "no element [en]" in refusal(path, tokenizer, prompt_column="pair[en]")
        assert "holds int" in refusal(path, tokenizer, prompt_column="id")
        assert "is not a column" in refusal(path, tokenizer, prompt_column="pair[")


class TestDraw:
    def test_the_seed_determines_the_prompts(self, tmp_path: Path, tokenizer: Any) -> None:
        path = prompts_file(tmp_path)
        first, again, other = (load(path, tokenizer, 5, 5, seed=seed) for seed in (1, 1, 2))
        assert first == again
        assert first.fingerprint != other.fingerprint
        assert texts(first) != texts(other)
        assert not {p.row for p in first.tuning} & {p.row for p in first.held_out}

    def test_empty_and_repeated_rows_are_skipped(self, tmp_path: Path, tokenizer: Any) -> None:
        path = write_jsonl(
            tmp_path / "a.jsonl", [{"prompt": text} for text in ["a", "", " \n", None, "b", "a", "b", "c"]]
        )
        assert sorted(texts(load(path, tokenizer, 2, 1))) == ["a", "b", "c"]
        message = refusal(path, tokenizer, num_tuning=2, num_held_out=2)
        assert "2 for tuning and 1 held out (rows left out: 3 empty; 2 repeated), but 2 and 2" in message

    def test_few_prompts_are_halved(self, tmp_path: Path, tokenizer: Any) -> None:
        path = prompts_file(tmp_path, WORDS[:13])
        prompts = load(path, tokenizer, 24, 24, fewest=6)
        assert texts(prompts) == texts(load(path, tokenizer, 7, 6))
        assert prompts.notes == (
            "few prompts: 7 for tuning and 6 held out, so intervals will be wide; 24 and 24 are usual",
        )
        message = refusal(prompts_file(tmp_path, WORDS[:11]), tokenizer, num_tuning=24, num_held_out=24, fewest=6)
        assert message.endswith(
            "6 and 6 are needed: give more, or --tuning-prompts 6 --held-out-prompts 5 for a wide interval"
        )

    def test_only_what_is_needed_is_tokenized(
        self, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoded = []

        def encode(_: PromptEncoder, content: Content) -> list[int]:
            encoded.append(content.text)
            return list(content.text.encode())

        monkeypatch.setattr(PromptEncoder, "encode", encode)
        path = prompts_file(tmp_path, [f"prompt {number}" for number in range(500)])
        load(path, tokenizer, 3, 4)
        assert len(encoded) == 7

    @pytest.mark.parametrize("seed", range(2))
    def test_no_group_in_both_parts(self, seed: int, tmp_path: Path, tokenizer: Any) -> None:
        sizes = {"a": 9, "b": 1, "c": 1, "d": 4, "e": 2}
        rows = [{"prompt": f"{file} {n}", "file": file} for file, size in sizes.items() for n in range(size)]
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        prompts = load(path, tokenizer, 8, 8, seed=seed, group_column="file")
        tuning, held_out = ({text.text[0] for text in part} for part in (prompts.tuning, prompts.held_out))
        assert not tuning & held_out
        assert prompts == load(path, tokenizer, 8, 8, seed=seed, group_column="file")


class TestCategories:
    def test_found_without_being_named(self, tmp_path: Path, tokenizer: Any) -> None:
        rows = [{"prompt": word, "task": f"kind {number % 3}"} for number, word in enumerate(WORDS)]
        prompts = load(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, 4, 4, num_spare=4)
        everything = (*prompts.tuning, *prompts.held_out, *prompts.spare)
        assert [prompt.category for prompt in everything] == [f"kind {prompt.row % 3}" for prompt in everything]

    def test_named(self, tmp_path: Path, tokenizer: Any) -> None:
        rows = [{"prompt": word, "category": "no", "level": number % 2} for number, word in enumerate(WORDS)]
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        prompts = load(path, tokenizer, category_column="level")
        assert [prompt.category for prompt in prompts.tuning] == [str(prompt.row % 2) for prompt in prompts.tuning]
        assert "no column 'levl'; did you mean 'level'? valid: category, level, prompt" in refusal(
            path, tokenizer, category_column="levl"
        )

    def test_classes_are_named(self, tmp_path: Path, tokenizer: Any) -> None:
        features = datasets.Features(
            {"text": datasets.Value("string"), "task": datasets.ClassLabel(names=["qa", "rag"])}
        )
        rows = datasets.Dataset.from_dict({"text": WORDS, "task": [0, 1] * 10}, features=features)
        rows.save_to_disk(tmp_path / "saved")
        prompts = load(tmp_path / "saved", tokenizer)
        assert [prompt.category for prompt in prompts.tuning] == [("qa", "rag")[p.row % 2] for p in prompts.tuning]

    def test_none_without_such_a_column_or_value(self, tmp_path: Path, tokenizer: Any) -> None:
        assert load(prompts_file(tmp_path), tokenizer).tuning[0].category is None
        rows = [{"prompt": word, "category": None, "tags": ["x"]} for word in WORDS]
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        assert load(path, tokenizer).tuning[0].category is None
        assert "holds lists or mappings" in refusal(path, tokenizer, category_column="tags")


class TestSpare:
    """Prompts outside the two parts, for training heads."""

    def test_spare_prompts_do_not_change_the_parts(self, tmp_path: Path, tokenizer: Any) -> None:
        path = prompts_file(tmp_path)
        without, some, all_of_them = (load(path, tokenizer, 4, 5, num_spare=spare) for spare in (0, 3, 100))
        assert without.spare == ()
        for more in (some, all_of_them):
            assert (more.tuning, more.held_out, more.fingerprint) == (
                without.tuning,
                without.held_out,
                without.fingerprint,
            )
        assert some.spare == all_of_them.spare[:3]
        rows = [prompt.row for prompt in (*all_of_them.tuning, *all_of_them.held_out, *all_of_them.spare)]
        assert sorted(rows) == list(range(20))

    def test_no_spare_prompt_is_in_a_held_out_group(self, tmp_path: Path, tokenizer: Any) -> None:
        rows = [{"prompt": f"number {number}", "file": number % 12} for number in range(40)]
        path = write_jsonl(tmp_path / "a.jsonl", rows)
        prompts = load(path, tokenizer, 6, 6, num_spare=100, group_column="file")
        held_out = {rows[prompt.row]["file"] for prompt in prompts.held_out}
        expected = {index for index, row in enumerate(rows) if row["file"] not in held_out}
        assert {prompt.row for prompt in (*prompts.tuning, *prompts.spare)} == expected

    def test_spare_prompts_that_do_not_fit_are_skipped(self, tmp_path: Path, tokenizer: Any) -> None:
        short = prompts_file(tmp_path, list("abcd"))
        parts = load(short, tokenizer, 1, 1)
        drawn = {prompt.row for prompt in (*parts.tuning, *parts.held_out)}
        longer = ["x" * 600 if row == min(set(range(4)) - drawn) else letter for row, letter in enumerate("abcd")]
        prompts = load(prompts_file(tmp_path, longer), tokenizer, 1, 1, num_spare=5)
        assert prompts.fingerprint == parts.fingerprint
        assert [len(prompt.text) for prompt in prompts.spare] == [1]


class TestTokens:
    def test_chat_template(self, tmp_path: Path, tokenizer: Any) -> None:
        tokenizer.chat_template = CHAT_TEMPLATE
        path = prompts_file(tmp_path)
        prompt = load(path, tokenizer).tuning[0]
        assert tokenizer.decode(prompt.token_ids) == f"[user] {prompt.text}[assistant]"
        turn = [{"role": "user", "content": prompt.text}]
        assert list(prompt.token_ids) == tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
        assert load(path, tokenizer, chat_template=False).tuning[0].token_ids[0] == BOS

    def test_a_template_with_a_date_gets_a_fixed_one(self, tokenizer: Any) -> None:
        tokenizer.chat_template = "\n{{ strftime_now('%d %b %Y') }} " + CHAT_TEMPLATE
        assert tokenizer.decode(encode_prompt("hi", tokenizer)) == "\n01 Jan 2025 [user] hi[assistant]"

    def test_too_long(self, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
        path = prompts_file(tmp_path, ["x" * 100, "y" * 100])
        with caplog.at_level(logging.WARNING, logger="transformers"):
            message = refusal(path, tokenizer, num_tuning=1, num_held_out=1, context_length=100)
        assert "2 too long, as at most 84 fit the model's context of 100 with 16 new ones" in message
        assert f"the dataset {path} gives 0 for tuning and 0 held out" in message
        assert "--set max_prompt_tokens=84 cuts them" in message
        assert not caplog.records  # the tokenizer's own warning of a long sequence
        assert len(texts(load(path, tokenizer, 1, 1, context_length=117))) == 2
        assert len(texts(load(path, tokenizer, 1, 1, context_length=None))) == 2

    @pytest.mark.parametrize("template", [None, CHAT_TEMPLATE])
    def test_cut_from_the_left(self, template: str | None, tmp_path: Path, tokenizer: Any) -> None:
        tokenizer.chat_template = template
        long = "".join(f"é{number}" for number in range(100))
        prompts = load(prompts_file(tmp_path, [long, "short"]), tokenizer, 1, 1, max_prompt_tokens=50)
        by_length = sorted((*prompts.tuning, *prompts.held_out), key=lambda prompt: len(prompt.text))
        assert by_length[0].text == "short"
        assert 49 <= len(by_length[1].token_ids) <= 50  # the letter at the cut is two tokens
        assert long.endswith(by_length[1].text)
        assert list(by_length[1].token_ids) == encode_prompt(by_length[1].text, tokenizer)

    def test_limits_that_contradict_the_context(self, tmp_path: Path, tokenizer: Any) -> None:
        path = prompts_file(tmp_path)
        assert "at most 496 fit" in refusal(path, tokenizer, max_prompt_tokens=497)
        assert "must be less than 16" in refusal(path, tokenizer, context_length=16)
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            PromptSettings(max_prompt_tokens=0)
