"""A new draft kind, one file and one registry entry, on its whole way: search, prediction, profile, bench, production."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from decoding.decode import Request
from decoding.decoder import Decoder, plain_decoder
from decoding.deploy import load_decoder
from decoding.draft_length import Fixed
from decoding.drafts import KINDS, LayerSkip
from decoding.errors import ProfileError
from decoding.profile import DraftProfile
from decoding.target import Target
from decoding.text import Ending
from studies.prediction.guided import GuidedSearch
from studies.prediction.predictor import Predictor
from studies.prediction.survey import Survey
from studies.samplers.draft_length import DraftLengthSettings
from tests.support.commands import SearchCommand
from tests.support.costs import made_up_costs
from tests.support.stored_trials import stored_records
from tests.support.toy_kind import TOY, Cycle
from tuner.cli.main import main
from tuner.review.tables import trials_csv

PROMPTS = ((3, 9, 27, 14, 42, 5), (8, 2, 2, 31), (50, 17, 33, 4))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cycle", TOY)


@pytest.fixture
def texts(target: Target) -> list[tuple[int, ...]]:
    return [plain_decoder(target).generate(Request(prompt, Ending(40))).tokens for prompt in PROMPTS]


def test_search_measures_it_losslessly(run_search: SearchCommand, workplace: Path) -> None:
    config = workplace.parent / "small.yaml"
    text = config.read_text().replace("study: [conf_layers, exit_layer, draft_length]\n", "study: draft_length\n")
    config.write_text(f"{text}studies: {{draft_length: {{draft: {{kind: cycle, period: 2}}}}}}\n")
    result = run_search()
    assert result.exit_code == 0, result.output
    assert "cycle of 2; " in result.stdout
    records = stored_records(workplace / "sdtune.db", "tiny/draft_length")
    assert [record.candidate.draft for record in records] == [Cycle(period=2)] * 3
    assert all(record.measurement is not None and record.measurement.is_lossless for record in records)
    rows = list(csv.DictReader(trials_csv(records).splitlines()))
    assert {(row["kind"], row["period"]) for row in rows} == {("cycle", "2")}


def test_kind_is_inferred_from_its_keys() -> None:
    assert DraftLengthSettings.model_validate({"draft": {"period": 2}}).draft == Cycle(period=2)


def test_prediction_has_the_rounds_of_decoding(target: Target, texts: list[tuple[int, ...]]) -> None:
    predictor = Predictor(Survey(target, PROMPTS, texts), made_up_costs(target), max_tokens=4)
    prediction = predictor.predict(Cycle(period=1), Fixed(max_tokens=3))
    decoder = Decoder(target, Cycle(period=1), Fixed(max_tokens=3))
    decoded = [decoder.generate(Request(prompt, Ending(40))) for prompt in PROMPTS]
    assert prediction.replayed.rounds == sum(len(each.rounds) for each in decoded)
    assert 0 < prediction.agreement < 1


def test_guided_search_chooses_it_from_a_pool(target: Target, texts: list[tuple[int, ...]]) -> None:
    predictor = Predictor(Survey(target, PROMPTS, texts), made_up_costs(target), max_tokens=4)
    pool = [LayerSkip(), Cycle(period=1)]  # a draft that skips nothing cannot gain
    search = GuidedSearch(pool, predictor, ["fixed"], seed=0, patience=3)
    choice = search.choose()
    assert choice is not None
    assert choice.prediction.draft == Cycle(period=1)


def test_profile_is_benched_and_decodes_in_production(
    target: Target, workplace: Path, prompts_file: Path, write_profile: Callable[..., Path]
) -> None:
    path = write_profile(Cycle(period=1), Fixed(max_tokens=3))
    assert DraftProfile.load(path).draft == Cycle(period=1)
    flags = [
        "--tuning-prompts",
        "4",
        "--held-out-prompts",
        "3",
        "--max-new-tokens",
        "20",
        "--against",
        "plain",
        "--out",
        "b",
    ]
    result = CliRunner().invoke(main, ["bench", str(path), "--dataset", str(prompts_file), *flags])
    assert result.exit_code == 0, result.output
    figures = json.loads((workplace / "b" / "bench.json").read_text())["contenders"]["profile"]
    assert figures["identical"] == figures["texts"] == 3
    prompt = torch.tensor([PROMPTS[1]])
    settings = {"max_new_tokens": 40, "do_sample": False}
    decoder = load_decoder(path)
    output = target.model.generate(prompt, custom_generate=decoder, **settings)
    assert torch.equal(output, target.model.generate(prompt, **settings))
    assert decoder.last_generation is not None
    assert sum(each.num_accepted for each in decoder.last_generation.rounds) > 0


def test_wrong_settings_of_it_are_refused_by_name(workplace: Path, write_profile: Callable[..., Path]) -> None:
    path = write_profile(Cycle(period=1))
    path.write_text(path.read_text().replace("period: 1", "perod: 1"))
    with pytest.raises(ProfileError, match=r"unknown key 'draft.perod'; did you mean 'period'\? valid: kind, period"):
        DraftProfile.load(path)
