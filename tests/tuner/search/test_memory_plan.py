"""The estimate of memory before weights are read: against true sizes, and against runs with fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from studies.prediction.survey import Survey
from tests.support.fake_8b import NUM_PARAMETERS, llama_8b_config
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.stored_trials import stored_trials
from tuner.cli.main import main
from tuner.config import DistillSettings, SearchConfig
from tuner.errors import MemoryShortageError
from tuner.heads.limits import bytes_per_head
from tuner.inputs import memory
from tuner.inputs.memory import ModelSize, explained_shortage, size_of_checkpoint
from tuner.search.memory_plan import MemoryPlan

DEMO = ROOT / "configs" / "demo" / "model"
GB = 10**9


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of an 8B model, and no weights."""
    folder = tmp_path_factory.mktemp("llama-8b")
    llama_8b_config().save_pretrained(folder)
    return folder


@pytest.fixture
def config(llama_8b: Path) -> SearchConfig:
    return SearchConfig(model=str(llama_8b), dataset="d", dtype="bfloat16", max_prompt_tokens=4000, device="cpu")


def plan(config: SearchConfig, free: int | None = 80 * GB) -> MemoryPlan:
    size = size_of_checkpoint(config.model, dtype=config.dtype, device=config.device)
    return MemoryPlan(size, config, free)


def test_sizes_of_the_demo_model_are_those_of_its_file() -> None:
    (path,) = DEMO.glob("*.safetensors")
    with safe_open(path, framework="pt") as weights:
        stored = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    size = size_of_checkpoint(str(DEMO), device="cpu")
    assert size.num_parameters == stored
    assert (size.dtype, size.weight_bytes) == (torch.float32, 4 * stored)
    model = AutoModelForCausalLM.from_pretrained(DEMO)
    assert size.block_parameters == sum(weight.numel() for weight in model.model.layers[-1].parameters())


def test_sizes_of_an_8b_model_come_from_its_configuration(config: SearchConfig) -> None:
    size = plan(config).size
    assert size.num_parameters == NUM_PARAMETERS
    assert size.weight_bytes == pytest.approx(16.06 * GB, rel=1e-3)
    assert size.cache_bytes == 2 * 32 * 8 * 128 * 2
    assert size.block_parameters == 218_112_000


def test_plan_of_an_8b_model_counts_what_lives_together(config: SearchConfig) -> None:
    planned = plan(config)
    assert planned.cache == 2 * 4064 * planned.size.cache_bytes
    assert 4 * GB < planned.survey < 9 * GB
    assert planned.heads == 4 * planned.size.block_parameters * 2
    assert planned.total == planned.size.weight_bytes + max(
        planned.distillation, planned.cache + planned.heads + planned.survey
    )
    assert planned.verdict() == "fits"
    assert plan(config, 18 * GB).verdict().startswith("the weights fit, but not all")
    assert plan(config, None).verdict().startswith("unknown")


def test_heads_are_distilled_in_groups_that_fit(config: SearchConfig) -> None:
    roomy, tight = plan(config), plan(config, 40 * GB)
    assert (roomy.heads_at_once, roomy.distillation > 36 * GB) == (12, True)
    assert 1 <= tight.heads_at_once < 12
    assert tight.size.weight_bytes + tight.distillation < 40 * GB
    three = config.model_copy(update={"distillation": DistillSettings(heads_at_once=3)})
    assert plan(three).heads_at_once == 3
    each = bytes_per_head(roomy.size, 4000, DistillSettings())
    assert roomy.distillation - plan(three).distillation == 9 * each


def test_model_larger_than_the_memory_is_refused_before_it_is_loaded(
    llama_8b: Path, prompts_file: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_free_ram", lambda *paths: 8 * GB)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", _never)
    flags = ["--model", str(llama_8b), "--dtype", "bfloat16", "--device", "cpu"]
    doctor = CliRunner().invoke(main, ["doctor", *flags])
    assert "16.06 GB" in doctor.stdout
    assert "8.00 GB free on the device: the weights do not fit" in " ".join(doctor.stdout.split())
    refused(doctor, "does not fit: its weights take 16.06 GB in bfloat16, and 8.00 GB are free")
    by_key = ["--set", "dtype=bfloat16", *(flag for flag in flags if flag not in ("--dtype", "bfloat16"))]
    refused(CliRunner().invoke(main, ["search", *by_key, "--dataset", str(prompts_file)]), "does not fit")
    refused(CliRunner().invoke(main, ["distill", *flags, "--dataset", str(prompts_file)]), "does not fit")


def test_dry_run_shows_memory_and_time(run_search: Callable[..., Result]) -> None:
    shown = " ".join(run_search("--dry-run", timeout="30m").stdout.split())
    assert "memory (estimate, before weights are read) weights" in shown
    assert "--timeout 30:00 min for everything (estimate): " in shown
    assert "for race, confirmation and results" in shown


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_running_out_of_memory_is_one_line_with_a_remedy(failure: Exception) -> None:
    with pytest.raises(MemoryShortageError) as shown, explained_shortage("surveying", "read less"):
        raise failure
    assert str(shown.value).startswith("out of memory while surveying: read less (")
    assert "\n" not in str(shown.value)
    with pytest.raises(RuntimeError, match="other"), explained_shortage("surveying", "read less"):
        raise RuntimeError("other")


def test_free_ram_is_within_the_limit_of_the_container(tmp_path: Path) -> None:
    assert memory._free_ram(tmp_path) > 2000
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory._free_ram(tmp_path) == 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._free_ram(tmp_path) > 2000


def test_size_of_a_loaded_model_is_that_of_its_checkpoint() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    assert ModelSize.of(model) == size_of_checkpoint(str(DEMO), device="cpu")


def _never(*args: Any, **options: Any) -> Any:
    raise AssertionError("weights were read")


def test_search_without_memory_for_a_survey_ends_in_one_line_and_keeps_its_trials(
    run_search: Callable[..., Result], workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record_all(survey: Survey, drafts: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32 GiB.\nSee the documentation")

    monkeypatch.setattr(Survey, "record_all", record_all)
    result = run_search()
    refused(result, "out of memory while choosing what to try", "lower survey_tokens", "finished trials stay in sqlite")
    stored = Path("sdtune.db")
    assert len(stored_trials(stored, "tiny/conf_layers")) == len(stored_trials(stored)) == 3
