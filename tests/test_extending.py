"""The examples of docs/extending.md run, losslessly."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import optuna
import pytest
import torch

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.draft_length import RULES, Fixed
from decoding.drafts import KINDS, DraftKind, LayerSkip
from decoding.profile import DraftProfile
from decoding.runners import RUNNERS
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate, Problem
from studies.prediction.predictors import predictor_of
from studies.rule_space import suggest_rule
from studies.samplers import SAMPLERS, load_sampler
from tests.support.tiny import tiny_llama
from tests.support.trying import Trying
from tuner.export.engines.registry import data_engines, load_engine
from tuner.export.plan import FixedLength, Plan
from tuner.export.shape import DraftShape

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
DEMO_PROFILE = PAGE.parents[1] / "configs" / "demo" / "result" / "profile.yaml"
REQUEST = Request(prompt=(5, 9, 17, 5, 9), ending=Ending(24))

Example = Callable[[str], ModuleType]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    """Import the example whose title on the page is `path`."""

    def load(path: str) -> ModuleType:
        found = re.search(rf'^```python title="{re.escape(path)}"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
        assert found is not None, path
        file = tmp_path / Path(path).name
        file.write_text(found[1], encoding="utf-8")
        name = path.removesuffix(".py").replace("/", ".")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_llama())


def _plain_tokens(target: Target) -> tuple[int, ...]:
    return plain_decoder(target).generate(REQUEST).tokens


def test_draft_length_rule(example: Example, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = example("decoding/draft_length/entropy_limit.py").EntropyLimit
    strict = Decoder(target, LayerSkip.blocks([4]), rule(limit=0.0)).generate(REQUEST)
    lenient = Decoder(target, LayerSkip.blocks([4]), rule(limit=20.0)).generate(REQUEST)
    assert strict.tokens == lenient.tokens == _plain_tokens(target)
    assert max(round.num_drafted for round in strict.rounds) == 1
    assert max(round.num_drafted for round in lenient.rounds) == rule().max_tokens
    monkeypatch.setitem(RULES, "entropy_limit", rule)
    chosen = optuna.trial.FixedTrial(
        {"rule": "entropy_limit", "entropy_limit.max_tokens": 5, "entropy_limit.limit": 1.5}
    )
    assert suggest_rule(chosen, ["entropy_limit"], max_tokens=8) == rule(max_tokens=5, limit=1.5)


def test_draft_kind(example: Example, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    repeat = example("decoding/drafts/repeat.py").Repeat
    example("decoding/drafters/repeat.py")
    example("studies/prediction/repeat.py")
    kind = DraftKind(repeat, "decoding.drafters.repeat:new_drafter", "studies.prediction.repeat:RepeatPredictor")
    monkeypatch.setitem(KINDS, "repeat", kind)
    candidate = Candidate(draft=repeat(period=2), draft_length=Fixed(max_tokens=3))
    assert Candidate.model_validate_json(candidate.key) == candidate
    assert candidate.draft.describe() == "repeat the last 2"
    assert type(predictor_of(candidate.draft)).__name__ == "RepeatPredictor"
    generation = Decoder(target, candidate.draft, candidate.draft_length).generate(REQUEST)
    assert generation.tokens == _plain_tokens(target)
    assert generation.num_drafted > 0


def test_study(example: Example, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    example("studies/samplers/single_block.py")
    monkeypatch.setitem(SAMPLERS, "single_block", "studies.samplers.single_block:SingleBlock")
    made = load_sampler("single_block")
    problem = Problem(target, prompts=((1, 2),), continuations=((3, 4),), earlier={}, seed=0)
    study = Trying(made(problem, made.Settings(num_tokens=3)))
    found = [each.candidate for each in study.run(2)]
    assert found == [Candidate(draft=LayerSkip.blocks([block]), draft_length=Fixed(max_tokens=3)) for block in (0, 1)]


def test_export(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = re.search(r'^```yaml title="configs/engines/candle.yaml"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
    assert found is not None
    (tmp_path / "candle.yaml").write_text(found[1], encoding="utf-8")
    monkeypatch.setattr("tuner.export.engines.registry.resources.files", lambda package: tmp_path)
    assert data_engines() == ["candle"]
    files = load_engine("candle").files(
        Plan(
            profile=DraftProfile.load(DEMO_PROFILE),
            model="m",
            dtype="float32",
            out=Path("/out"),
            shape=DraftShape((0, 1), has_head=True, num_target_layers=24),
            length=FixedLength(4, "as asked"),
            threshold=None,
            lookup=None,
        )
    )
    assert "--draft /out/draft --draft-tokens 4" in files["launch.sh"]


def test_runner(example: Example, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    example("decoding/runners/traced.py")
    monkeypatch.setitem(RUNNERS, "traced", "decoding.runners.traced:TracedRunner")
    traced = Target(target.model, "traced")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        generation = Decoder(traced, LayerSkip.blocks([4]), Fixed(max_tokens=3)).generate(REQUEST)
    assert generation.tokens == _plain_tokens(target)
    assert any(event.key == "pass over 4" for event in profile.key_averages())
