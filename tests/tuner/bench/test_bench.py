"""`sdtune bench` on a tiny model: a profile beside what users would take instead, and what is made of the samples."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from transformers import AutoTokenizer

from decoding.draft_length import AdaEdl, Fixed
from decoding.drafts import LayerSkip
from decoding.profile import DatasetFacts, Decoding, Exactness, Interval, Measured, Rates, SearchCost
from decoding.target import Target
from studies.measurement import Measurement, PairedPrefill, PromptSample, geometric_means, sum_repeats
from tests.support.commands import command_line
from tests.support.heads import write_heads
from tests.support.records import sample
from tests.support.refusals import refused
from tests.support.shown import check_readable
from tests.support.tiny import save_tiny_checkpoint, write_tiny_prompts
from tuner.bench.contenders import CONTENDERS, MODES
from tuner.bench.report import BenchResult, BenchVerdict, bench_json, bench_table
from tuner.cli.main import main
from tuner.fields import PromptSettings
from tuner.inputs.prompts import load_prompts
from tuner.measuring.comparison import Compared, Phase
from tuner.measuring.contender import Decoded, Prompts
from tuner.measuring.paired import OwnDecoding

SIZES = {"tuning-prompts": 4, "held-out-prompts": 3}
NUM_NEW_TOKENS = 10
"""Twice what a sequence needs to count."""
NUM_OF_SEARCH = 18
"""Tokens that a profile says its search decoded."""
OTHER_RUNNERS = [f"{who}-{mode}" for mode in MODES for who in ("plain", "profile")]
NOT_BY_OTHER_RUNNERS = [name for name in CONTENDERS if name not in OTHER_RUNNERS]
RunBench = Callable[..., Result]
WriteProfile = Callable[..., Path]


@pytest.fixture
def bench(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> RunBench:
    """`sdtune bench` with small sizes, its results in the folder `b`."""

    def run(profile: Path, dataset: Path, **flags: Any) -> Result:
        sizes = {name.replace("-", "_"): value for name, value in SIZES.items()}
        given = {**sizes, "max_new_tokens": NUM_NEW_TOKENS, "out": "b", "dataset": dataset, **flags}
        return CliRunner().invoke(main, [*command_line("bench", given), str(profile)])

    return run


@pytest.fixture
def code(workplace: Path) -> Path:
    return write_tiny_prompts(workplace / "code.jsonl")


def results(workplace: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((workplace / "b" / "bench.json").read_text())
    return found


def flat(text: str) -> str:
    """Without the line breaks of the table's legend."""
    return " ".join(text.split())


def measured(fingerprint: str, **sizes: int) -> Measured:
    """The confirmation that a search writes into a profile."""
    facts = {"tuning_prompts": 4, "held_out_prompts": 3, "max_new_tokens": NUM_OF_SEARCH, **sizes}
    return Measured(
        speedup=Interval(value=1.2, ci95=(1.1, 1.3)),
        tokens_per_second=Rates(draft=12, plain=10),
        draft_acceptance_rate=0.5,
        tokens_per_round=2,
        exact=Exactness(prompts=3, identical=3),
        search=SearchCost(trials=3, seconds=4),
        device="a device",
        versions={},
        dataset=DatasetFacts(name="code.jsonl", fingerprint=fingerprint, **facts),
    )


def test_all_contenders_write_plain_decodings_text_and_all_is_kept(
    workplace: Path, target: Target, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    profile = write_profile(write_heads(target, workplace, [4])[4], AdaEdl(initial_threshold=0.7, max_tokens=3))
    result = bench(profile, code, against=",".join(NOT_BY_OTHER_RUNNERS), repeats=2)
    assert result.exit_code == 0, result.output
    found = results(workplace)
    assert list(found["contenders"]) == list(found["samples"]) == NOT_BY_OTHER_RUNNERS
    assert found["left_out"] == {}
    for name, figures in found["contenders"].items():
        samples = found["samples"][name]
        assert [each["prompt"] for each in samples] == [0, 1, 2], "repeats are added up"
        assert all(each["identical"] and not each["tie"] for each in samples)
        prefills = [each["prefill"] for each in samples]
        tokens = [a["draft_tokens"] + b["draft_tokens"] for a, b in zip(prefills, samples, strict=True)]
        assert tokens == [2 * NUM_NEW_TOKENS] * 3
        assert all(each["draft_seconds"] > 0 for each in (*prefills, *samples))
        assert (figures["identical"], figures["texts"], figures["ties"]) == (6, 6, 0)
        assert figures["mean_acceptance_length"] == pytest.approx(figures["tokens_per_pass"], abs=0.2)
        whole = figures["end_to_end"]
        seconds = sum(each["draft_seconds"] for each in (*prefills, *samples))
        assert whole["tokens_per_second"]["value"] == pytest.approx(6 * NUM_NEW_TOKENS / seconds)
        mean_prefill = sum(each["draft_seconds"] for each in prefills) / 6
        assert whole["time_to_first_token_seconds"] == pytest.approx(mean_prefill)
        for key in ("tokens_per_second", "over_plain", "profile_over_it"):
            low, high = figures[key]["ci95"]
            assert low <= figures[key]["value"] <= high
        ratio = figures["tokens_per_second"]["value"] / found["contenders"]["plain"]["tokens_per_second"]["value"]
        assert figures["over_plain"]["value"] == pytest.approx(ratio)
    assert found["contenders"]["plain"]["over_plain"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    assert found["contenders"]["plain"]["tokens_per_pass"] == 1.0
    assert found["contenders"]["profile"]["settings"]["draft"]["exit_layer"] == 4
    assert len(found["rows"]) == 3
    assert (found["model"], found["dataset"], found["dtype"]) == ("tiny", "code.jsonl", "float32")
    assert {"torch", "transformers", "sdtune"} <= set(found["provenance"]["versions"])
    assert str(workplace.parent) not in (workplace / "b" / "bench.json").read_text(), "no folder of this machine"
    table = (workplace / "b" / "bench.txt").read_text()
    for word in (
        *NOT_BY_OTHER_RUNNERS,
        "over plain",
        "profile over it",
        "6/6",
        "early exit at layer 4 (trained head)",
    ):
        assert word in table
        assert word in result.stdout
    assert "…" not in table


def test_held_out_prompts_of_the_search_are_measured_and_reported_as_such(
    workplace: Path, checkpoint: Path, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = {"num_tuning": 4, "num_held_out": 3, "max_new_tokens": NUM_OF_SEARCH, "context_length": 256}
    of_search = load_prompts(str(code), tokenizer, seed=5, settings=PromptSettings(group_column="file"), **sizes)
    profile = write_profile(LayerSkip.blocks((3,)), measured=measured(of_search.fingerprint))
    own = {"tuning_prompts": None, "held_out_prompts": None, "max_new_tokens": None, "against": "plain"}
    same = bench(profile, code, group_column="file", seed=5, **own)
    assert same.exit_code == 0, same.output
    found = results(workplace)
    assert found["rows"] == [prompt.row for prompt in of_search.held_out]
    assert found["max_new_tokens"] == NUM_OF_SEARCH
    assert "held out by the search that made the profile" in flat(same.stdout)
    other = bench(profile, code, seed=5, **own)
    assert other.exit_code == 0, other.output
    assert "not the prompts that the search of the profile kept apart (on code.jsonl)" in flat(other.stdout)
    assert "held out" not in results(workplace)["split"]
    assert bench(profile, code, group_column="file", seed=5, prompts=2, **own).exit_code == 0
    assert results(workplace)["rows"] == [prompt.row for prompt in of_search.held_out[:2]]
    refused(bench(profile, code, prompts=5, **own), "--prompts 5 is more than the 3", "--held-out-prompts 5")


def test_who_cannot_run_here_is_left_out_with_the_reason(
    workplace: Path, code: Path, write_profile: WriteProfile, bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        name, description = "hf-static", "breaks"
        settings: Mapping[str, Any] = {}

        def prepare(self, batches: Sequence[Prompts], max_new_tokens: int) -> None:
            pass

        def decode(self, prompts: Prompts, max_new_tokens: int) -> Decoded:
            raise NotImplementedError("no such cache for this family")

    def impossible(name: str, setting: Any) -> Any:
        raise ValueError("not with this model")

    monkeypatch.setitem(CONTENDERS, "hf-static", lambda name, setting: Broken())
    monkeypatch.setitem(CONTENDERS, "hf-prompt-lookup", impossible)
    result = bench(write_profile(LayerSkip.blocks((3,))), code, against="hf,hf-static,hf-prompt-lookup")
    assert result.exit_code == 0, result.output
    assert results(workplace)["left_out"] == {
        "hf-prompt-lookup": "ValueError: not with this model",
        "hf-static": "NotImplementedError: no such cache for this family",
    }
    assert list(results(workplace)["contenders"]) == ["profile", "plain", "hf"]
    table = (workplace / "b" / "bench.txt").read_text()
    assert [line.split() for line in table.splitlines() if line.startswith(" hf-static")] == [
        ["hf-static", "left", "out"]
    ]
    assert "left out: NotImplementedError: no such cache for this family" in flat(table)


def test_what_cannot_be_compared_is_one_line(
    workplace: Path, target: Target, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    profile = write_profile(LayerSkip.blocks((3,)))
    refused(
        bench(profile, code, against="hf,hf-statik"),
        "unknown contender 'hf-statik'",
        "did you mean 'hf-static'",
        "plain",
    )
    refused(bench(profile, workplace / "none.jsonl"), "no such dataset")
    refused(bench(workplace / "none.yaml", code), "no such profile")
    refused(bench(profile, code, out="code.jsonl"), "code.jsonl is a file; name a folder")
    refused(bench(profile, code, out="no/such"), "cannot write results into no/such")
    refused(bench(profile, code, device="abacus"), "no device 'abacus'")
    refused(bench(profile, code, max_new_tokens=254), "too few prompts", "context of 256", "max_prompt_tokens")
    refused(bench(profile, code, held_out_prompts=30), "too few prompts")
    refused(
        bench(profile, code, model=save_tiny_checkpoint(workplace / "model", seed=1)), "was tuned for", "other weights"
    )
    draft = write_heads(target, workplace / "elsewhere", [4])[4]
    refused(bench(write_profile(draft, name="head.yaml"), code), "no such exit head", "exit_head_4.safetensors")
    assert not (workplace / "b").exists()


def text_sample(seconds: float, prompt: int, *, prefill: float = 0.5, tokens: int = 10, **facts: Any) -> PromptSample:
    """A sample of a contender, beside plain decoding of 4 s."""
    paired = PairedPrefill(plain_seconds=0.5, plain_tokens=1, draft_seconds=prefill, draft_tokens=1)
    values = {"plain_seconds": 4.0, "draft_seconds": seconds, "draft_tokens": tokens, "prefill": paired}
    return sample(1.0, prompt, **{**values, **facts})


def compared(**samples: Sequence[PromptSample]) -> Compared:
    """Contenders that took turns: each sample has the plain one of its prompt beside it."""
    plain = {each.prompt: each for each in samples["plain"]}
    found = {name: tuple(beside(plain[each.prompt], each) for each in own) for name, own in samples.items()}
    return Compared({name: Measurement(samples=own) for name, own in found.items()}, {})


def beside(plain: PromptSample, own: PromptSample) -> PromptSample:
    assert plain.prefill is not None
    assert own.prefill is not None
    prefill = own.prefill.model_copy(update={"plain_seconds": plain.prefill.draft_seconds})
    plain_work = {"plain_seconds": plain.draft_seconds, "plain_tokens": plain.draft_tokens}
    return own.model_copy(update={**plain_work, "prefill": prefill})


class Named:
    """A contender of which only the description is asked for."""

    settings: Mapping[str, Any] = {}

    def __init__(self, name: str) -> None:
        self.name, self.description = name, f"what {name} is"


def made_up(*, batch_size: int = 1, **samples: Sequence[PromptSample]) -> BenchResult:
    found = compared(**samples)
    return BenchResult(
        contenders={name: Named(name) for name in samples},  # type: ignore[misc]
        everything=found.measurements,
        compared=found,
        left_out={"hf-static": "RuntimeError: no"},
        prompt_lengths=(20, 30, 40, 50, 60, 70),
        facts={"split": "held out", "provenance": {"device": "a device"}, "dtype": "bfloat16", "profile": "p"},
        remarks=("a note",),
        batch_size=batch_size,
    )


def test_repeats_of_a_prompt_are_one_sample_and_make_no_interval_narrower() -> None:
    once = [text_sample(seconds, index) for index, seconds in enumerate((2.0, 2.0, 3.0))]
    # Repeats that took half a second more and less.
    repeats = [text_sample(each.draft_seconds + half, each.prompt) for half in (0.5, -0.5) for each in once]
    twice = sum_repeats(repeats)
    assert [(s.prompt, s.draft_tokens, s.rounds, s.texts.count) for s in twice.samples] == [
        (index, 20, 10, 2) for index in range(3)
    ]
    assert twice.speedup_interval() == Measurement(samples=tuple(once)).speedup_interval()
    wrong = sum_repeats([once[0], once[0].model_copy(update={"identical": False, "tie": True})]).samples[0]
    assert (wrong.identical, wrong.tie, wrong.texts.identical, wrong.texts.ties) == (False, True, 1, 1)


def test_end_to_end_counts_prefill_seconds_and_first_tokens() -> None:
    plain = [text_sample(9.0 + i, i, prefill=1.0) for i in range(3)]
    drafted = [text_sample(6.0 + i, i, prefill=3.0) for i in range(3)]
    result = made_up(plain=plain, profile=drafted)
    assert result.compared.over("profile").value == pytest.approx(30 / 21)
    assert result.compared.over("profile", "plain", Phase.END_TO_END).value == pytest.approx(33 / 30)
    figures = bench_json(result)["contenders"]["profile"]["end_to_end"]
    assert figures["over_plain"]["value"] == pytest.approx(1.1)
    assert figures["time_to_first_token_seconds"] == pytest.approx(3.0)


def test_a_profile_that_only_decodes_faster_is_named() -> None:
    plain = [text_sample(9.0 + i / 9, i, prefill=1.0) for i in range(3)]
    drafted = [text_sample(7.0 + i / 9, i, prefill=9.0) for i in range(3)]
    found = BenchVerdict.of(compared(plain=plain, profile=drafted))
    assert (found.decode, found.end_to_end, found.contradicted) == (("profile",), (), ("profile",))
    assert "slower end to end" in found.sentence
    none = BenchVerdict.of(compared(plain=plain, profile=plain))
    assert none.sentence == "nothing beats plain decoding with 95 % confidence"


def test_categories_have_speedups_of_their_own_and_a_geometric_mean() -> None:
    names = ("qa", "qa", "summary", "summary", "summary", None)
    plain = [text_sample(4.0 + i / 9, i, category=name) for i, name in enumerate(names)]
    drafted = [
        text_sample((2.0 if name == "qa" else 4.0) + i / 9, i, category=name, accepted=4, accepted_lengths=(3, 0, 2))
        for i, name in enumerate(names)
    ]
    document = bench_json(made_up(plain=plain, profile=drafted))
    assert document["categories"] == {"qa": 2, "summary": 3}
    of_profile = document["contenders"]["profile"]
    assert {name: each["over_plain"]["value"] for name, each in of_profile["categories"].items()} == {
        "qa": pytest.approx((8 + 1 / 9) / (4 + 1 / 9)),
        "summary": pytest.approx(1.0),
    }
    mean = of_profile["category_mean_over_plain"]
    assert mean["value"] == pytest.approx(((8 + 1 / 9) / (4 + 1 / 9)) ** 0.5)
    assert mean["ci95"][0] < mean["value"] < mean["ci95"][1]
    assert document["verdicts"]["summary"]["decode"] == []
    assert of_profile["categories"]["qa"]["mean_acceptance_length"] == pytest.approx(1 + 4 / 5)
    assert of_profile["draft_acceptance_rate"] == pytest.approx(4 / 10)
    assert of_profile["acceptance_histogram"] == {0: 18, 2: 12}, "as in AIPerf's"
    one = compared(plain=[plain[0], *plain[2:]], profile=[drafted[0], *drafted[2:]])
    assert geometric_means(one.measurements["profile"].by_category()) is None, "a prompt by itself has no interval"


def test_what_code_of_others_drafts_is_not_known() -> None:
    stock = [text_sample(2.0 + index, index, drafted=None) for index in range(3)]
    figures = bench_json(made_up(plain=stock, profile=stock, hf=stock))["contenders"]["hf"]
    assert (figures["num_draft_tokens"], figures["draft_acceptance_rate"]) == (None, None)
    assert figures["mean_acceptance_length"] == pytest.approx(1 + 8 / 5)


def test_table() -> None:
    samples = [text_sample(2.0 + index, index) for index in range(3)]
    different = [each.model_copy(update={"identical": False, "tie": index == 1}) for index, each in enumerate(samples)]
    result = made_up(profile=samples, plain=samples, hf=different)
    lines = printed(result).splitlines()
    hf = next(line for line in lines if line.startswith(" hf "))
    assert "0/3" in hf
    assert lines[lines.index(hf) + 1].split() == ["+", "1", "tie"]
    assert "1.00 [1.00, 1.00]" in hf
    latencies = ["hf", *["500.0"] * 3, "300.0", "380.0", "398.0"]
    assert latencies in [line.split() for line in lines], "percentiles of 500 ms, and of 200 to 400 ms a token"
    assert bench_json(result)["contenders"]["hf"]["latency"]["tpot_ms"]["p90"] == pytest.approx(380)
    check_readable(bench_table(result), [(name, "1.00 [1.00, 1.00]") for name in ("profile", "hf")])
    assert any("left out: RuntimeError: no" in line for line in lines)
    assert any("a note" in line for line in lines)


def printed(result: BenchResult) -> str:
    from rich.console import Console

    console = io.StringIO()
    Console(file=console, width=120).print(bench_table(result))
    return console.getvalue()


# --- several texts side by side ---------------------------------------------------------------------------------------

SIDE_BY_SIDE = ["profile", "plain", "plain-static", "profile-static", "hf", "hf-static"]


@pytest.mark.usefixtures("uncompiled")
def test_all_contenders_decode_batches_as_they_decode_single_prompts(
    workplace: Path, target: Target, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    profile = write_profile(write_heads(target, workplace, [4])[4], AdaEdl(initial_threshold=0.7, max_tokens=3))
    result = bench(profile, code, against=",".join(SIDE_BY_SIDE), batch_size=3, held_out_prompts=7, repeats=2)
    assert result.exit_code == 0, result.output
    found = results(workplace)
    assert (found["batch_size"], found["prompts"], found["counted"]) == (3, 6, [0, 1])
    assert list(found["contenders"]) == SIDE_BY_SIDE
    assert found["left_out"] == {}
    for name, figures in found["contenders"].items():
        samples = found["samples"][name]
        assert [each["prompt"] for each in samples] == [0, 1]
        assert (figures["identical"], figures["texts"]) == (12, 12), name
        for each in samples:
            assert (each["prefill"]["draft_tokens"], each["draft_tokens"]) == (6, 6 * (NUM_NEW_TOKENS - 1))
        if "profile" not in name:
            assert figures["tokens_per_pass"] == 1.0
    assert found["contenders"]["profile"]["tokens_per_pass"] > 1.0
    said = flat(result.stdout)
    assert "2 batches of 3 prompts" in said
    assert "tokens and seconds are sums over a batch of 3 sequences" in said
    assert "the last 1 prompts are not measured: they fill no batch of 3" in said
    assert "12/12" in said
    assert "in turns" not in said


def test_contenders_without_batches_are_left_out_with_the_reason(
    workplace: Path, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    profile = write_profile(LayerSkip.blocks((3,)))
    result = bench(profile, code, batch_size=2, held_out_prompts=4)
    assert result.exit_code == 0, result.output
    found = results(workplace)
    assert list(found["contenders"]) == ["profile", "plain", "hf"]
    assert set(found["left_out"]) == {"hf-prompt-lookup"}
    assert all("transformers does not support it" in reason for reason in found["left_out"].values())
    assert "left out: transformers does not support it: its assisted generation decodes one sequence" in flat(
        result.stdout
    )
    lookup = bench(profile, code, against="hf,hf-prompt-lookup", batch_size=2)
    refused(lookup, "hf-prompt-lookup does not work", "transformers does not")
    for name in ("plain-bitwise", "profile-bitwise"):
        refused(
            bench(profile, code, against=name, batch_size=2),
            f"{name} does not work",
            "bit-exact mode decodes one sequence",
        )
    refused(bench(profile, code, runner="bitwise", batch_size=2), "--batch-size 2", "bit-exact mode", "eager or static")
    exact = write_profile(LayerSkip.blocks((3,)), name="e.yaml", decoding=Decoding(runner="static", exact_width=4))
    refused(bench(exact, code, batch_size=2), "--batch-size 2", "bit-exact mode")


def test_fewer_than_two_batches_are_refused(
    workplace: Path, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    profile = write_profile(LayerSkip.blocks((3,)))
    refused(
        bench(profile, code, batch_size=2),
        "--batch-size 2 makes 1 whole batches of 3 prompts",
        "4 or more prompts",
        "--held-out-prompts",
    )
    refused(bench(profile, code, batch_size=3, held_out_prompts=9, prompts=5), "1 whole batches of 5", "6 or more")
    refused(bench(profile, code, batch_size=0), "--batch-size")
    assert not (workplace / "b").exists()


def test_a_batch_is_compared_with_texts_that_were_written_alone(
    workplace: Path, code: Path, write_profile: WriteProfile, bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = OwnDecoding.decode

    def decode(self: OwnDecoding, prompts: Prompts, max_new_tokens: int) -> Decoded:
        return honest(self, [prompts[0], *prompts[:1]], max_new_tokens)  # everybody's batch of ours is wrong

    monkeypatch.setattr(OwnDecoding, "decode", decode)
    result = bench(write_profile(LayerSkip.blocks((3,))), code, against="hf", batch_size=2, held_out_prompts=4)
    assert result.exit_code == 0, result.output
    figures = results(workplace)["contenders"]
    assert [figures[name]["identical"] for name in ("profile", "plain", "hf")] == [2, 2, 4]


# --- by our other runners ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("uncompiled")
def test_every_runner_of_ours_can_be_put_beside(
    workplace: Path, code: Path, write_profile: WriteProfile, bench: RunBench
) -> None:
    profile = write_profile(LayerSkip.blocks((3, 4)), Fixed(max_tokens=12))
    result = bench(
        profile, code, against=",".join(OTHER_RUNNERS), max_new_tokens="16"
    )  # room for drafts cut to 8 positions
    assert result.exit_code == 0, result.output
    found = results(workplace)
    assert set(found["contenders"]) == {"profile", "plain", *OTHER_RUNNERS}
    assert all(figures["identical"] == figures["texts"] for figures in found["contenders"].values())
    assert found["contenders"]["profile-bitwise"]["settings"]["decoding"]["exact_width"] == 8
    drafted = found["contenders"]["profile-static"]["tokens_per_pass"]
    assert found["contenders"]["profile-bitwise"]["tokens_per_pass"] < drafted, "its drafts are shorter"
    assert "bit-exact mode: every pass of the whole model runs on 8 positions" in flat(result.output)


@pytest.mark.usefixtures("uncompiled")
def test_bit_exact_output_is_compared_with_plain_decoding_of_its_own_mode(
    workplace: Path, code: Path, write_profile: WriteProfile, bench: RunBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = OwnDecoding.decode

    def decode(self: OwnDecoding, prompts: Prompts, max_new_tokens: int) -> Decoded:
        others = [[*prompt[:-1], prompt[-1] ^ 1] for prompt in prompts]
        return honest(self, others if self.name == "plain-bitwise" else prompts, max_new_tokens)

    monkeypatch.setattr(OwnDecoding, "decode", decode)
    assert bench(write_profile(LayerSkip.blocks((3, 4))), code, against="profile-bitwise").exit_code == 0
    figures = results(workplace)["contenders"]
    assert list(figures) == ["profile", "plain", "plain-bitwise", "profile-bitwise"]
    assert (figures["profile-bitwise"]["identical"], figures["profile-bitwise"]["ties"]) == (0, 0)
    assert figures["plain"]["identical"] == 3
