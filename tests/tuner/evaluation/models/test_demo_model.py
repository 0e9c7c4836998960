import csv
import json
import platform
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.paths import DEMO
from tuner.cli.main import main
from tuner.evaluation.models import demo_prompts
from tuner.evaluation.models.demo_model import training
from tuner.evaluation.models.demo_model.corpus import Corpus, library_corpus, window_starts
from tuner.evaluation.models.demo_model.held_out import held_out_loss, token_bytes
from tuner.evaluation.models.demo_model.layer_dropout import StepPlan, plan_step, tapped
from tuner.evaluation.models.demo_model.recipe import Recipe, RecipeError
from tuner.evaluation.models.demo_model.run import Start, train
from tuner.evaluation.models.demo_model.training import new_model

CPU = torch.device("cpu")
TINY = Recipe(
    num_layers=4,
    hidden_size=16,
    num_heads=2,
    mlp_size=24,
    vocabulary_size=300,
    max_positions=64,
    steps=12,
    batch_size=2,
    context=16,
    warmup_steps=2,
    max_layer_dropout=0.9,
    checkpoint_every=5,
    evaluate_every=6,
    curve_every=4,
)


def source(number: int) -> str:
    lines = [f"    value_{number}_{line} = compute({line}, scale={number})" for line in range(30)]
    return "\n".join([f"def function_{number}(argument):", *lines, f"    return value_{number}_0", ""])


def fill(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source(number))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("library")
    fill(root, [f"module_{number}.py" for number in range(6)])
    return library_corpus("library", root, num_held_out=2)


@pytest.fixture(scope="module")
def finished(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    train(TINY, corpus, out, device=CPU)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def equal(one: Path, other: Path) -> bool:
    left, right = weights(one), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_leaves_a_stock_model_with_curve_and_report(finished: Path, corpus: Corpus) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished)
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == 4
    assert AutoTokenizer.from_pretrained(finished).eos_token_id == 0
    assert json.loads((finished / "held_out_files.json").read_text()) == corpus.held_out_names
    report = json.loads((finished / "training.json").read_text())
    assert (report["steps"], report["tokens"], report["seed"]) == (12, 12 * 2 * 16, 0)
    assert report["held_out"]["nats_per_token"] > 0
    assert report["held_out"]["bits_per_byte"] > 0
    assert report["corpus"]["training_files"] == 4
    with (finished / "training_curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [4, 6, 8, 12]
    assert [bool(row["held_out_loss"]) for row in rows] == [False, True, False, True]
    assert not list(finished.glob("checkpoint*"))


def test_no_file_names_a_folder_of_the_machine(finished: Path, corpus: Corpus) -> None:
    for path in (*finished.glob("*.json"), *finished.glob("*.csv")):
        text = path.read_text()
        assert str(corpus.root) not in text
        assert str(finished) not in text


def test_the_same_seed_gives_the_same_weights(finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(TINY, corpus, tmp_path / "again", device=CPU)
    train(TINY.model_copy(update={"seed": 1}), corpus, tmp_path / "other", device=CPU)
    assert equal(finished, tmp_path / "again")
    assert not equal(finished, tmp_path / "other")


def test_a_killed_run_resumes_to_the_same_result(
    finished: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_at_7(recipe: Recipe, step: int) -> StepPlan:
        if step == 7:
            raise KeyboardInterrupt
        return plan_step(recipe, step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "plan_step", killed_at_7)
        with pytest.raises(KeyboardInterrupt):
            train(TINY, corpus, tmp_path, device=CPU)
    with pytest.raises(RecipeError, match="another steps, context"):
        train(TINY.model_copy(update={"steps": 20, "context": 8}), corpus, tmp_path, device=CPU)

    seen: list[int] = []

    def watched(recipe: Recipe, step: int) -> StepPlan:
        seen.append(step)
        return plan_step(recipe, step)

    monkeypatch.setattr(training, "plan_step", watched)
    train(TINY, corpus, tmp_path, device=CPU)
    assert seen == list(range(5, 12))
    assert equal(finished, tmp_path)
    assert (finished / "training_curve.csv").read_text() == (tmp_path / "training_curve.csv").read_text()


def test_a_finished_run_is_not_overwritten(finished: Path, corpus: Corpus) -> None:
    with pytest.raises(RecipeError, match="finished run"):
        train(TINY, corpus, finished, device=CPU)


def test_a_finished_model_is_continued_with_its_tokenizer(finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    report = train(TINY, corpus, tmp_path, device=CPU, start=Start(finished, "first stage"))
    assert (tmp_path / "tokenizer.json").read_text() == (finished / "tokenizer.json").read_text()
    assert report["continued_from"]["note"] == "first stage"
    assert report["continued_from"]["training"]["steps"] == 12
    first = json.loads((finished / "training.json").read_text())
    assert report["held_out_before"] == pytest.approx(first["held_out"]["nats_per_token"])
    with pytest.raises(RecipeError, match="hidden_size=16, the recipe 32"):
        train(TINY.model_copy(update={"hidden_size": 32}), corpus, tmp_path / "x", device=CPU, start=Start(finished))


def test_the_held_out_loss_takes_every_token_once(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(finished)
    text = source(9)
    tokens = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int32)
    context = (len(tokens) - 1) // 3
    loss = held_out_loss(model, tokenizer, tokens, context, batch_size=2)
    assert loss.num_tokens == 3 * context
    nats = [
        model(input_ids=piece[None, :-1]).logits.log_softmax(-1)[0].gather(1, piece[1:, None]).sum().item()
        for start in range(0, 3 * context, context)
        if (piece := tokens[start : start + context + 1].long()) is not None
    ]
    assert loss.nats_per_token == pytest.approx(-sum(nats) / loss.num_tokens, rel=1e-5)
    assert int(token_bytes(tokenizer)[tokens.long()].sum()) == len(text.encode())


def test_layer_forwards_are_restored_even_after_an_error() -> None:
    model = new_model(TINY)
    tokens = torch.arange(8)[None]
    before = model(tokens).logits

    def use() -> None:
        with tapped(model.model.layers) as tap:
            assert torch.equal(model(tokens).logits, before)
            tap.plan = StepPlan(frozenset({1, 3}), 1)
            assert not torch.equal(model(tokens).logits, before)
            assert tap.exit_hidden is not None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert all("forward" not in vars(layer) for layer in model.model.layers)
    assert torch.equal(model(tokens).logits, before)


def test_layer_dropout_grows_with_depth_and_rates_end_at_zero() -> None:
    recipe = Recipe()
    rates = [recipe.layer_dropout(index) for index in range(recipe.num_layers)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0, pytest.approx(0.2))
    plans = [plan_step(recipe, step) for step in range(2000)]
    assert Counter(plan.exit_block for plan in plans).keys() == set(range(2, 23))
    assert sum(23 in plan.skipped for plan in plans) / 2000 == pytest.approx(0.2, abs=0.03)
    factors = [recipe.rate_factor(step) for step in (0, recipe.warmup_steps, recipe.steps // 2, recipe.steps)]
    assert factors == [pytest.approx(1 / 61), 1, 1, 0]


def test_an_epoch_takes_every_window_once() -> None:
    recipe = TINY.model_copy(update={"batch_size": 3})
    starts = sorted(start for step in range(4) for start in window_starts(13 * 16, recipe, step))
    assert len(starts) == 12
    assert {later - earlier for earlier, later in pairwise(starts)} == {16}
    assert starts[0] >= 0
    assert starts[-1] + 17 <= 13 * 16


def test_tests_are_added_without_data_and_without_copies_of_held_out_files(tmp_path: Path) -> None:
    fill(tmp_path, ["a.py", "b.py", "test/test_a.py", "test/data/copy.py", "idlelib/shell.py", "lib2to3/main.py"])
    plain = library_corpus("library", tmp_path, num_held_out=1)
    held_out = plain.held_out_files[0]
    (tmp_path / "test" / "copied.py").write_text("# a copy\n" + held_out.read_text())
    corpus = library_corpus("library+tests", tmp_path, num_held_out=1)
    assert corpus.held_out_files == plain.held_out_files
    assert set(corpus.training_files) == {*plain.training_files, tmp_path / "test" / "test_a.py"}
    assert corpus.num_duplicates == 1


def test_a_corpus_without_tests_or_of_another_name_is_refused(corpus: Corpus) -> None:
    with pytest.raises(RecipeError, match="without its `test` package"):
        library_corpus("library+tests", corpus.root)
    with pytest.raises(RecipeError, match="valid: library, library\\+tests"):
        library_corpus("books", corpus.root)


def test_command_trains_with_flags_of_the_recipe(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.evaluation.models.demo_model.corpus.library_corpus", lambda name: corpus)
    recipe = TINY.model_copy(update={"steps": 2})
    flags = [part for name, value in recipe for part in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["evaluate", "demo-model", "--out", str(tmp_path / "out"), "--device", "cpu", *flags]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "bits per byte" in result.stdout
    assert json.loads((tmp_path / "out" / "training.json").read_text())["recipe"] == recipe.model_dump()
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2
    assert again.stderr.splitlines()[-1].startswith("sdtune: ")
    assert "finished run" in again.stderr


def test_the_shipped_model_is_stock_and_small() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    assert model.dtype == torch.bfloat16
    assert (DEMO / "model" / "model.safetensors").stat().st_size <= 17_000_000
    wanted = Recipe().llama_config()
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        assert getattr(model.config, key) == getattr(wanted, key)
    assert len(AutoTokenizer.from_pretrained(DEMO / "model")) == 4096


def test_shipped_prompts_are_from_held_out_files_and_of_the_right_length() -> None:
    prompts = [json.loads(line) for line in (DEMO / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    held_out = set(json.loads((DEMO / "held_out_files.json").read_text()))
    assert len(prompts) >= 96
    assert {prompt["file"] for prompt in prompts} <= held_out
    assert max(Counter(prompt["file"] for prompt in prompts).values()) <= 8
    lengths = [len(ids) for ids in tokenizer([prompt["prompt"] for prompt in prompts])["input_ids"]]
    assert min(lengths) >= 64
    assert max(lengths) <= 512
    assert sum(length > 256 for length in lengths) >= 24


def test_shipped_lists_are_the_output_of_the_recipes_on_their_python(tmp_path: Path) -> None:
    """On another interpreter the sources differ; there the recipes only have to run."""
    out, files = tmp_path / "prompts.jsonl", DEMO / "held_out_files.json"
    arguments = ["--model", str(DEMO / "model"), "--held-out", str(files), "--out", str(out)]
    corpus = library_corpus("library")
    if platform.python_version() != "3.11.7":
        (tmp_path / "files.json").write_text(json.dumps(corpus.held_out_names))
        arguments[3] = str(tmp_path / "files.json")
    result = CliRunner().invoke(main, ["evaluate", "demo-prompts", *arguments])
    assert result.exit_code == 0, result.output
    if platform.python_version() == "3.11.7":
        assert corpus.held_out_names == json.loads(files.read_text())
        assert out.read_text() == (DEMO / "prompts.jsonl").read_text()


def test_prompts_of_a_file_do_not_overlap_and_leave_a_continuation() -> None:
    text = "\n\n".join(source(number) for number in range(20))
    cut = demo_prompts.Cut(shortest=20, longest=60, continuation=30, most_per_file=5)
    prompts = demo_prompts.cut_file(text, "file.py", cut, lambda piece: len(piece.split()))
    assert len(prompts) == 5
    begins = [text.index(prompt) for prompt in prompts]
    ends = [begin + len(prompt) for begin, prompt in zip(begins, prompts, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    assert all(prompt.startswith("def ") and text[end] == "\n" for prompt, end in zip(prompts, ends, strict=True))
    assert all(20 <= len(prompt.split()) <= 60 for prompt in prompts)
    assert len(text[ends[-1] :].split()) >= 30
