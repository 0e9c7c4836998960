"""`sdtune export` from profile to folder: used by transformers, refused, and never written in part."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM
from transformers.generation import BaseStreamer

from decoding.drafts import Draft, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.target import Target
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.engine_stub import write_llama_cpp
from tests.support.heads import write_heads
from tests.support.profiles import save_profile
from tests.support.refusals import refused
from tuner.cli.main import main
from tuner.export import run as export_run

Export = Callable[..., Result]
SKIP = LayerSkip.blocks((2, 3, 4))


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    """Write a profile of a draft for the tiny checkpoint and export it into `out`."""
    monkeypatch.chdir(tmp_path)

    def run(draft: Draft, to: str, *flags: str) -> Result:
        save_profile(Path("profile.yaml"), checkpoint, draft)
        return CliRunner().invoke(main, ["export", "profile.yaml", "--to", to, "--out", "out", *flags])

    return run


def test_transformers_generates_plain_texts_with_the_exported_head(
    export: Export, target: Target, tmp_path: Path, checkpoint: Path
) -> None:
    draft = write_heads(target, tmp_path, [2])[2]
    done = export(draft.having(lookup=Lookup()), "hf")
    assert done.exit_code == 0, done.output
    assert "max difference 0" in done.stderr
    assistant = AutoModelForCausalLM.from_pretrained("out/draft")
    assert assistant.config.num_hidden_layers == 3
    assert assistant.generation_config.num_assistant_tokens_schedule == "constant"
    model, inputs = AutoModelForCausalLM.from_pretrained(checkpoint), torch.tensor([[5, 17, 33, 8]])
    plain = model.generate(inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(inputs, max_new_tokens=12, do_sample=False, assistant_model=assistant), plain)
    assert (
        "lookup before the draft | prompt lookup (n-grams of 3 to 1, 10 tokens) | lost"
        in Path("out/LOSSES.md").read_text()
    )


@pytest.mark.parametrize(
    ("draft", "to", "flags", "words"),
    [
        (
            LayerSkip(skip_attention=(2, 3), skip_mlp=(3,)),
            "vllm",
            (),
            ["sublayers", "--to folder", "--deploy-to vllm|llama.cpp"],
        ),
        (
            LayerSkip(skip_attention=(2,), skip_mlp=(2,), bits=8),
            "hf",
            (),
            ["int8", "--drop bits", "search ... --deploy-to vllm|llama.cpp"],
        ),
        (LayerSkip(bits=8), "vllm", ("--drop", "bits"), ["the whole model", "--deploy-to vllm|llama.cpp"]),
        (PlainDecoding(), "hf", (), ["decode plainly"]),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    export: Export, draft: Draft, to: str, flags: tuple[str, ...], words: list[str]
) -> None:
    refused(export(draft, to, *flags), *words)
    assert not Path("out").exists()


def test_a_lookup_alone_needs_no_draft_folder(export: Export) -> None:
    done = export(PromptLookup(max_ngram=4), "vllm")
    assert done.exit_code == 0, done.output
    assert not Path("out/draft").exists()
    assert json.loads(Path("out/speculative_config.json").read_text())["method"] == "ngram"


@pytest.mark.parametrize("to", ["vllm", "llama.cpp", "sglang"])
def test_a_moved_export_starts_its_engine_in_place_of_the_shell(export: Export, tmp_path: Path, to: str) -> None:
    done = export(SKIP, to, "--out", "it's é")
    assert done.exit_code == 0, done.output
    assert "next     read it's é/README.md" in done.stdout
    moved = Path("it's é").rename("moved")
    launch = (moved / "launch.sh").read_text()
    assert launch.startswith('#!/bin/sh\nset -eu\ncd "$(dirname "$0")"\nexec ')
    assert '"${MODEL:-/' in (moved / ("convert.sh" if to == "llama.cpp" else "launch.sh")).read_text()
    written = [path.read_text() for path in moved.iterdir() if path.is_file() and path.name != "profile.yaml"]
    assert not [text for text in written if f"{tmp_path}/it" in text]
    assert "at 100% as it was tuned" not in (losses := (moved / "LOSSES.md").read_text())
    assert "Keys and values are computed by its own layers" in losses
    readme = (moved / "README.md").read_text()
    assert "./launch.sh" in readme
    if to == "llama.cpp":
        sources = write_llama_cpp(tmp_path / "llama.cpp")
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        subprocess.run([moved / "convert.sh"], check=True, env={"PATH": path, "LLAMA_CPP": str(sources)})
        assert (moved / "target.gguf").read_text() == (moved / "draft.gguf").read_text() == "gpt-2"
        assert "LLAMA_CPP=DIR ./convert.sh" in readme


def test_a_folder_that_is_no_export_is_never_replaced(export: Export) -> None:
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("years of work")
    refused(export(SKIP, "vllm"), "not empty", "--overwrite")
    refused(export(SKIP, "vllm", "--overwrite"), "no earlier export")
    assert [path.name for path in Path("out").iterdir()] == ["thesis.txt"]


def test_an_export_replaces_an_earlier_one_whole_or_not_at_all(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    assert export(PromptLookup(), "vllm").exit_code == 0
    before = sorted(path.name for path in Path("out").iterdir())

    def fail(*args: object) -> tuple[int, float]:
        raise export_run.ExportError("its logits differ by up to 1")

    with monkeypatch.context() as patched:
        patched.setattr(export_run, "check_draft", fail)
        refused(export(SKIP, "mlx", "--overwrite"), "differ by up to 1")
    assert sorted(path.name for path in Path("out").iterdir()) == before
    assert export(SKIP, "mlx", "--overwrite").exit_code == 0
    assert Path("out/draft/model.safetensors").exists()
    assert not Path("out/speculative_config.json").exists()
    assert not [path for path in Path().iterdir() if path.name.startswith(".out")]


class _Tokens(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


@pytest.fixture
def folder(export: Export, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a profile of an exit with head; transformers copies its code into an empty cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    draft = write_heads(target, tmp_path, [2])[2]
    done = export(draft, "folder")
    assert done.exit_code == 0, done.output
    return Path("out").absolute()


def test_a_model_folder_decodes_by_the_profile(folder: Path, checkpoint: Path) -> None:
    plain_model, inputs = AutoModelForCausalLM.from_pretrained(checkpoint), torch.tensor([[5, 17, 33, 8]])
    settings = {"max_new_tokens": 24, "do_sample": False}
    plain = plain_model.generate(inputs, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder)
    streamer = _Tokens()
    found = model.generate(inputs, **settings, custom_generate=str(folder), trust_remote_code=True, streamer=streamer)
    assert torch.equal(found, plain)
    assert (streamer.tokens, streamer.ends) == (plain[0].tolist(), 1)
    trusted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert torch.equal(trusted.generate(input_ids=inputs, **settings), plain)
    tokenizer = byte_tokenizer()
    stop = tokenizer.decode(plain[0, 12:14])
    ended = plain_model.generate(inputs, **settings, stop_strings=stop, tokenizer=tokenizer)
    assert ended.shape[1] < plain.shape[1]
    assert torch.equal(trusted.generate(inputs, **settings, stop_strings=stop, tokenizer=tokenizer), ended)


def test_the_weights_of_a_model_folder_are_links_or_copies(folder: Path, export: Export, target: Target) -> None:
    assert (folder / "model.safetensors").is_symlink()
    assert not (folder / "config.json").is_symlink()
    assert (folder / "custom_generate" / "requirements.txt").read_text() == "sdtune\n"
    card = ModelCard.load(folder / "README.md")
    assert "custom_generate" in card.data.tags
    assert 'custom_generate="written by a test"' in card.text
    draft = write_heads(target, folder.parent, [2])[2]
    assert export(draft, "folder", "--overwrite", "--copy-weights").exit_code == 0
    assert not (folder / "model.safetensors").is_symlink()


def test_settings_that_a_folder_or_an_engine_does_not_have_are_refused(export: Export) -> None:
    refused(export(SKIP, "folder", "--draft-tokens", "3"), "keeps the whole profile")
    refused(export(SKIP, "vllm", "--copy-weights"), "--to folder")
