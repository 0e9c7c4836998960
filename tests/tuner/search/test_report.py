"""Tables, pictures and the CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Rectangle
from rich.console import Console, RenderableType

from decoding.draft_length import AdaEdl, BetaThompson, Fixed, RoundCosts
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.probe import Capabilities
from decoding.profile import (
    DatasetFacts,
    DraftProfile,
    Exactness,
    Interval,
    Measured,
    ProfileOrigin,
    Rates,
    SearchCost,
    TargetIdentity,
)
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import BatchTexts, Measurement, PairedPrefill, PromptSample
from tests.support.records import candidate, measurement, record, sample
from tuner.search.held_out import NOTHING, ResultRow, results_table
from tuner.search.report import (
    capabilities_panel,
    profile_panel,
    skipped_layers_picture,
    speedup_picture,
    trials_csv,
)
from tuner.trial_columns import trial_params

RECORDS = [
    record(1.1, number=0),
    record(1.3, number=1, blocks=(1, 5), notes={"lambda": 0.05}),
    record(None, number=2),
    record(0.8, number=3, state=TrialState.PRUNED, reason="slower"),
    record(1.3, number=4, blocks=(1, 5), repeat_of=1),
    record(1.4, number=0, study="draft_length", candidate=candidate((1, 5), AdaEdl())),
]


def _text(renderable: RenderableType, width: int = 80) -> str:
    console = Console(width=width, no_color=True, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(renderable)
    console.file.close()
    return console.export_text()


def test_the_csv_has_a_line_for_each_trial_and_a_column_for_everything() -> None:
    rows = list(csv.DictReader(trials_csv(RECORDS).splitlines()))
    assert [row["state"] for row in rows] == ["COMPLETE", "COMPLETE", "FAIL", "PRUNED", "COMPLETE", "COMPLETE"]
    assert float(rows[1]["tuning_speedup"]) == pytest.approx(1.3)
    assert rows[1]["skip_mlp"] == "1,5"
    assert rows[1]["note.lambda"] == "0.05"
    assert rows[2]["reason"] == "it broke"
    assert rows[2]["tuning_speedup"] == ""
    assert rows[4]["repeat_of"] == "1"
    assert rows[5]["rule.gamma"] == "0.2"


@pytest.mark.parametrize("num_layers", [6, 80])
@pytest.mark.parametrize(
    "records", [RECORDS, RECORDS * 20, RECORDS[2:3], []], ids=["few", "many", "all failed", "none"]
)
def test_pictures_are_drawn_whatever_the_search_found(
    tmp_path: Path, records: list[TrialRecord], num_layers: int
) -> None:
    skipped_layers_picture(records, num_layers, None, tmp_path / "layers.png")
    speedup_picture(records, None, None, tmp_path / "speedup.png")
    for name in ("layers.png", "speedup.png"):
        picture = imread(tmp_path / name)
        assert min(picture.shape[:2]) > 300
        assert picture.std() > 0.01


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_columns_of_the_layers_picture_carry_trial_numbers_and_studies(tmp_path: Path, drawn: list[Figure]) -> None:
    skipped_layers_picture(RECORDS, 6, "conf_layers/1", tmp_path / "layers.png")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2", "3", "0"]  # 4 repeats 1
    assert [text.get_text().strip() for text in axes.texts] == ["conf_layers", "draft_length"]
    assert "the winner, conf_layers/1" in axes.get_title(), "the confirmed winner, not the best trial"
    (frame,) = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert frame.get_x() == 0.5


def test_a_large_layers_picture_keeps_its_size_and_few_ticks(tmp_path: Path, drawn: list[Figure]) -> None:
    skipped_layers_picture([record(1.0 + n / 1000, number=n) for n in range(300)], 80, None, tmp_path / "layers.png")
    assert max(drawn[0].get_size_inches()) <= 16
    assert len(drawn[0].axes[0].get_xticks()) <= 30


def test_failed_trials_do_not_stretch_the_scale_of_the_speedups(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [record(None, number=0), record(1.1, number=1), record(1.3, number=2)]
    speedup_picture(records, None, None, tmp_path / "speedup.png")
    (axes,) = drawn[0].axes
    assert axes.get_ylim()[0] > 0.9
    assert "failed" in axes.get_legend_handles_labels()[1]
    assert "pruned" not in axes.get_legend_handles_labels()[1]
    (line,) = (line for line in axes.lines if line.get_label() == "best so far")
    assert list(line.get_ydata())[1:] == pytest.approx([1.1, 1.3])


def test_the_winner_is_framed_and_its_held_out_speedup_is_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    records = [record(1.1, number=0), record(1.3, number=1)]
    speedup_picture(records, "conf_layers/0", Interval(value=1.2, ci95=(1.1, 1.3)), tmp_path / "speedup.png")
    labels = drawn[0].axes[0].get_legend_handles_labels()[1]
    assert "winner, conf_layers/0" in labels
    assert "winner, held-out prompts" in labels


def test_a_winner_that_runs_no_layers_is_named_and_nothing_is_framed(tmp_path: Path, drawn: list[Figure]) -> None:
    skipped_layers_picture(RECORDS, 6, "joint/4", tmp_path / "layers.png")
    (axes,) = drawn[0].axes
    assert "joint/4, runs no layers" in axes.get_title()
    assert not axes.patches


def test_the_final_table_fits_80_columns_with_interval_and_exactness() -> None:
    rows = [
        ResultRow("plain decoding", "the whole model", None),
        ResultRow("conf_layers", "skip 2,3", measurement([1.2, 1.4, 1.3])),
        ResultRow("best ada_edl_published", "skip 2,3", measurement([1.2, 1.4, 1.3])),
    ]
    text = _text(results_table(rows))
    assert "1.30 [1.07, 1.57]" in text
    assert "3/3" in text
    assert "80%" in text
    assert "…" not in text


def of_category(name: str, ratios: list[float], first: int, *, prefill: float = 1.0) -> list[PromptSample]:
    """Samples of a category whose candidate takes `prefill` times plain decoding's seconds for the prompt."""
    charged = PairedPrefill(plain_seconds=1.0, plain_tokens=1, draft_seconds=prefill, draft_tokens=1)
    return [sample(ratio, first + n, category=name, prefill=charged) for n, ratio in enumerate(ratios)]


def test_the_final_tables_show_end_to_end_and_each_category_and_fit_80_columns() -> None:
    samples = (*of_category("coding", [3.0, 3.1], 0), *of_category("translation", [0.9, 1.0], 2))
    rows = [ResultRow("plain decoding", "whole", None), ResultRow("joint", "skip", Measurement(samples=samples))]
    text = _text(results_table(rows))
    assert "…" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    whole = Measurement(samples=samples).end_to_end
    assert whole is not None
    assert f"joint {whole.speedup_interval()} 5.5 {whole.plain.tokens_per_second:.1f} 1000.0 1.00 [1.00, 1.00]" in lines
    assert any(line.startswith("joint coding 2 3.05 [") for line in lines)
    assert any(line.startswith("joint geometric mean 1.70 [") for line in lines)
    assert f"translation {NOTHING}" in lines
    assert f"coding {NOTHING}" not in lines


@pytest.mark.parametrize(("ratio", "prefill", "says_so"), [(1.0, 1.0, True), (1.5, 9.0, True), (1.5, 1.0, False)])
def test_the_final_tables_say_if_nothing_beats_plain_decoding(ratio: float, prefill: float, says_so: bool) -> None:
    measured = Measurement(samples=tuple(of_category("coding", [ratio] * 3, 0, prefill=prefill)))
    assert (NOTHING in _text(results_table([ResultRow("joint", "skip", measured)]))) is says_so


def test_the_final_table_of_batches_says_so_and_counts_prompts() -> None:
    batch = BatchTexts(count=4, identical=3, ties=1)
    samples = tuple(
        sample(ratio, index, identical=False, tie=True, batch=batch) for index, ratio in enumerate([1.2, 1.3])
    )
    text = _text(results_table([ResultRow("joint", "skip 2,3", Measurement(samples=samples))]), width=100)
    assert "Held-out prompts in batches of 4:" in text
    assert "6/8" in text
    assert "+ 2 ties" in text
    assert "batches" not in _text(results_table([ResultRow("joint", "skip 2,3", measurement([1.2, 1.4]))]))


def test_a_profile_of_batches_says_so() -> None:
    profile = _profile()
    assert profile.measured is not None
    assert "in lockstep" not in _text(profile_panel(profile))
    of_batches = profile.measured.model_copy(update={"batch_size": 8})
    text = _text(profile_panel(profile.model_copy(update={"measured": of_batches})), width=120)
    assert "in lockstep" in text
    assert "8 prompts in lockstep" in text


def _profile(*, plain: bool = False) -> DraftProfile:
    facts = {"architecture": "LlamaForCausalLM", "dtype": "float32", "config_sha256": "a", "weights_sha256": "b"}
    measured = Measured(
        speedup=Interval(value=1.41, ci95=(1.36, 1.46)),
        tokens_per_second=Rates(draft=148.2, plain=105.1),
        draft_acceptance_rate=0.86,
        tokens_per_round=3.4,
        exact=Exactness(prompts=32, identical=31, ties=1),
        search=SearchCost(trials=64, seconds=412.0),
        device="a device",
        versions={"torch": "2.13.0"},
        dataset=DatasetFacts(name="code", fingerprint="f", tuning_prompts=32, held_out_prompts=32, max_new_tokens=96),
    )
    return DraftProfile(
        name="demo",
        target=TargetIdentity(model="m", num_layers=12, **facts),
        draft=PlainDecoding() if plain else LayerSkip(skip_attention=(3, 4), skip_mlp=(4, 11)),
        draft_length=AdaEdl(),
        measured=None if plain else measured,
        provenance=ProfileOrigin(created="2026-01-01", study="conf_layers", git_revision="abc", mlflow_run_id="123"),
    )


def test_a_profile_is_one_screen_that_says_it_all() -> None:
    text = _text(profile_panel(_profile()))
    assert len(text.splitlines()) <= 30
    for words in (
        "1.41x, 95 % interval 1.36 to 1.46",
        "148.2",
        "31 of 32",
        "1 numerical ties",
        "64 trials, 412 s",
        "ada_edl",
    ):
        assert words in text
    assert "    layer 0    5    10" in text
    assert "attention ###..#######" in text
    assert "      MLP ####.######." in text
    assert "git revision abc, MLflow run 123" in text


def test_a_profile_of_a_busy_machine_says_so() -> None:
    profile = _profile()
    assert profile.measured is not None
    assert "machine was busy" not in _text(profile_panel(profile))
    noisy = profile.measured.model_copy(update={"noise": ("decoding waited for a processor for 40% of its time",)})
    text = _text(profile_panel(profile.model_copy(update={"measured": noisy})), width=120)
    assert "Ship, but measure again: the machine was busy" in text
    assert "waited for a processor for 40%" in text


def test_a_profile_says_which_method_proposed_its_draft() -> None:
    profile = _profile()
    assert "proposed by" not in _text(profile_panel(profile)), "one study has one method"
    origin = profile.provenance.model_copy(update={"study": "joint", "origin": "conf_layers (x, lambda -0.1)"})  # type: ignore[union-attr]
    text = _text(profile_panel(profile.model_copy(update={"provenance": origin})))
    assert "by joint" in text
    assert "conf_layers (x, lambda -0.1)" in text


def test_names_are_shown_word_for_word() -> None:
    profile = _profile()
    target = profile.target.model_copy(update={"model": "models/[bold]x[/b]"})
    text = _text(profile_panel(profile.model_copy(update={"name": "[/red] one", "target": target})))
    assert "models/[bold]x[/b]" in text
    assert "[/red] one" in text
    text = _text(results_table([ResultRow("[/a]", "[b]", measurement([1.2, 1.4]))]))
    assert "[/a]" in text
    assert "[b]" in text


def test_a_profile_of_plain_decoding_says_so() -> None:
    text = _text(profile_panel(_profile(plain=True)))
    assert "plain decoding" in text
    assert "ada_edl" not in text


def test_a_supported_and_a_refused_model_are_told_apart() -> None:
    layers = tuple(range(4))
    fit = Capabilities("Llama", 4, 10, "float32", "cpu", layers, layers, (0, 1, 3), prefix_reuse=True)
    assert "can be tuned" in _text(capabilities_panel(fit))
    assert "3 of 4 can be skipped: 0,1,3" in _text(capabilities_panel(fit))
    text = _text(capabilities_panel(Capabilities("Mamba", refusal="it keeps a recurrent state")))
    assert "cannot be tuned: it keeps a recurrent state" in text


HEAD = EarlyExit(exit_layer=4, head="demo.exit_head_4.safetensors", head_sha256="a" * 64)


def test_columns_of_an_exit_say_where_and_with_what_head() -> None:
    params = trial_params(record(candidate=Candidate(draft=HEAD, draft_length=Fixed())))
    assert (params["kind"], params["exit_layer"], params["exit_head"]) == ("early_exit", 4, "block")
    without = trial_params(record(candidate=Candidate(draft=EarlyExit(exit_layer=4), draft_length=Fixed())))
    assert without["exit_head"] == "none"


def test_columns_of_a_lookup_are_its_settings_wherever_it_stands() -> None:
    alone = trial_params(record(candidate=Candidate(draft=PromptLookup(max_ngram=4), draft_length=Fixed())))
    assert (alone["kind"], alone["lookup.max_ngram"], alone["lookup.min_ngram"]) == ("prompt_lookup", 4, 1)
    draft = LayerSkip(skip_mlp=(3,), lookup=Lookup(min_ngram=2, max_tokens=7))
    first = trial_params(record(candidate=Candidate(draft=draft, draft_length=Fixed())))
    assert (first["kind"], first["lookup.min_ngram"], first["lookup.max_tokens"]) == ("layer_skip", 2, 7)
    without = trial_params(record(candidate=Candidate(draft=HEAD, draft_length=Fixed())))
    assert not [key for key in without if key.startswith("lookup")]


@pytest.mark.parametrize("costs", [None, RoundCosts(draft_step=0.2, verify=(1.0, 1.1))])
def test_columns_of_an_adaptive_rule_are_its_settings_only(costs: RoundCosts | None) -> None:
    params = trial_params(record(candidate=candidate((1,), BetaThompson(costs=costs, forgetting=0.96))))
    assert params["rule.forgetting"] == 0.96
    assert not {"rule.costs", "rule.prior"} & set(params)


def test_blocks_after_an_exit_are_drawn_as_skipped(tmp_path: Path, drawn: list[Figure]) -> None:
    plain = Candidate(draft=PlainDecoding(), draft_length=Fixed())
    records = [
        record(1.4, number=0, candidate=Candidate(draft=HEAD, draft_length=Fixed()), study="exit_layer"),
        record(1.0, number=1, candidate=plain, study="exit_layer"),
        record(1.1, number=0, blocks=(1, 5), study="conf_layers"),
    ]
    skipped_layers_picture(records, 6, None, tmp_path / "layers.png")
    (axes,) = drawn[0].axes
    grid = axes.images[0].get_array()
    assert grid is not None
    assert grid[:, 0].tolist() == [0, 0, 0, 0, 3, 3]
    assert grid[:, 1].tolist() == [0, 3, 0, 0, 0, 3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "0"]


def test_profile_of_an_exit_shows_head_layers_and_what_distilling_took() -> None:
    profile = _profile()
    assert profile.measured is not None
    cost = SearchCost(trials=64, seconds=412.0, distillation_seconds=90.0)
    measured = profile.measured.model_copy(update={"search": cost})
    text = _text(profile_panel(profile.model_copy(update={"draft": HEAD, "measured": measured})))
    for words in ("exit at 4, trained head", "demo.exit_head_4.safetensors", "412 s; 90 s to distil exit heads"):
        assert words in text
    assert "attention ####........" in text
    text = _text(profile_panel(profile.model_copy(update={"draft": EarlyExit(exit_layer=4)})))
    assert "exit at 4, no head" in text
    assert "distil" not in text


def test_profile_with_a_lookup_shows_it_and_what_stops_it() -> None:
    profile = _profile()
    text = _text(profile_panel(profile.model_copy(update={"draft": PromptLookup(min_ngram=2)})))
    assert "prompt lookup (3-2)" in text
    assert "ada_edl" in text
    assert "####" not in text, "it leaves nothing out of the model, which drafts nothing"
    draft = EarlyExit(exit_layer=4, lookup=Lookup())
    text = _text(profile_panel(profile.model_copy(update={"draft": draft})))
    assert "lookup (3-1, 10), then exit at 4, no head" in text
    assert "attention ####........" in text
