"""Model folders of others' making: code that they bring, sizes that nobody has, weights that are no numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.paths import ROOT
from tests.support.tiny import save_tiny_checkpoint
from tuner.errors import ConfigError
from tuner.inputs.checkpoint import checkpoint_configuration
from tuner.inputs.memory import size_of_checkpoint
from tuner.inputs.models import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "model", 2)


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusals(folder: Path) -> list[str]:
    """Return what the ways to a model say of it."""
    found = []
    for way in (checkpoint_configuration, size_of_checkpoint, load):
        with pytest.raises(ConfigError) as refused:
            way(str(folder))
        assert "\n" not in str(refused.value)
        found.append(str(refused.value))
    return found


def test_code_of_a_model_is_not_run_and_nobody_is_asked(folder: Path, tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    change(folder / "config.json", model_type="evil", auto_map=auto_map)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    # A loop of a shell that reads the same input gets the line that is left.
    script = '"$@"; status=$?; read -r line; echo "$status $line"'
    program = [sys.executable, "-c", "import tuner.cli.launch as l; l.launch()", "doctor", "--model", str(folder)]
    done = subprocess.run(
        ["sh", "-c", script, "sh", *program], input="y\n", capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "2 y", "the line is still there"
    assert "sdtune: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("num_hidden_layers", 10**9, "has num_hidden_layers 1000000000, above 1,000"),
        ("hidden_size", 2**40, "has hidden_size 1099511627776, above 67,108,864"),
        ("vocab_size", 10**400, "above 67,108,864"),
        ("num_attention_heads", 10**9, "above"),
    ],
    ids=["layers", "hidden", "vocabulary", "heads"],
)
def test_sizes_that_no_model_has(key: str, value: int, told: str, folder: Path) -> None:
    change(folder / "config.json", **{key: value})
    assert all(told in each for each in refusals(folder))
    change(folder / "config.json", **{key: 2, "text_config": {key: value}})
    assert all(told in each for each in refusals(folder))


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_a_tokenizer_that_makes_texts_grow(part: str, folder: Path) -> None:
    step = {"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 10}
    change(folder / "tokenizer.json", **{part: {"type": "Sequence", f"{part}s": [step] * 2}})
    load(str(folder))
    change(folder / "tokenizer.json", **{part: {"type": "Sequence", f"{part}s": [step] * 9}})
    with pytest.raises(ConfigError, match=f"makes texts up to 1e.09 times longer by its {part}"):
        load(str(folder))


@pytest.mark.parametrize(
    ("value", "name", "dtype"),
    [
        (float("nan"), "model.embed_tokens.weight", "float32"),
        (float("inf"), "model.layers.1.mlp.down_proj.weight", "bfloat16"),
        (-float("inf"), "model.embed_tokens.weight", "float16"),
    ],
)
def test_weights_that_are_no_numbers(value: float, name: str, dtype: str, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name].clone()
    weights[name][-1, 3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"is damaged: {name} holds NaN or infinite numbers"):
        load(str(folder), dtype=dtype)


def test_numbers_at_the_edge_are_taken(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = torch.finfo(torch.float32).max
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(str(folder))
