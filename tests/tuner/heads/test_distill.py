"""`sdtune distill` on a tiny model: heads that load, refusals, and resuming after a kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tuner.heads.distill
import tuner.heads.plan
from decoding.exit_heads import load_exit_head, read_facts
from decoding.target import Target
from tests.support.commands import command_line
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tuner.cli.main import main
from tuner.fields import PromptSettings
from tuner.heads.texts import GeneratedText, TextPlan, generate_texts
from tuner.heads.training import Run, evaluate
from tuner.inputs.prompts import PromptSet, load_prompts

DistillCommand = Callable[..., Result]


@pytest.fixture
def arguments(workplace: Path, checkpoint: Path, prompts_file: Path) -> dict[str, str | None]:
    """Return the flags of a small distillation."""
    config = workplace.parent / "small.yaml"
    config.write_text(
        "max_new_tokens: 12\ntuning_prompts: 6\nheld_out_prompts: 6\nprompts_per_trial: 4\ntimeout: 90s\nout: profile.yaml\n"
        "group_column: file\nexperiment: tiny\nheads: heads\nstudies: {draft_length: {max_tokens: 8}}\n"
        "distillation: {steps: 12, samples: 4, response_tokens: 12, checkpoint_every: 4, learning_rate: 0.01, batch_size: 8}\n"
    )
    return {
        "config": str(config),
        "model": str(checkpoint),
        "dataset": str(prompts_file),
        "exit_layers": "2-3",
        "tracking_uri": f"sqlite:///{workplace.parent / 'mlflow.db'}",
    }


@pytest.fixture
def run_distill(arguments: dict[str, str | None]) -> DistillCommand:
    """Run `sdtune distill` on the tiny model; keyword arguments override flags, None removes one, True is a switch."""

    def run(**changes: str | bool | None) -> Result:
        return CliRunner().invoke(main, command_line("distill", {**arguments, **changes}))

    return run


def _prompts(prompts_file: Path, checkpoint: Path) -> PromptSet:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return load_prompts(
        str(prompts_file),
        tokenizer,
        num_tuning=6,
        num_held_out=6,
        num_spare=100,
        max_new_tokens=12,
        context_length=256,
        seed=0,
        settings=PromptSettings(group_column="file"),
    )


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _runs(workplace: Path) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
    return client.search_runs([client.get_experiment_by_name("tiny").experiment_id])


class TestHeads:
    def test_distilled_heads_load_and_match_their_figures(
        self, run_distill: DistillCommand, workplace: Path, checkpoint: Path, prompts_file: Path
    ) -> None:
        result = run_distill()
        assert result.exit_code == 0, result.output
        for word in (
            "acceptance",
            "agreement",
            "s of sampling continuations",
            "s of training",
            "mlflow ui",
            "search --set heads=heads",
        ):
            assert word in result.stdout
        heads = workplace / "heads"
        assert _files(heads) == {"exit_head_2.safetensors", "exit_head_3.safetensors", "texts"}
        assert _files(workplace) == {"heads"}

        target = Target(AutoModelForCausalLM.from_pretrained(checkpoint))
        prompts = _prompts(prompts_file, checkpoint)
        held_out = TextPlan(tuple(prompt.token_ids for prompt in prompts.held_out), 1, 0.0, 12, 32, 0)
        texts = generate_texts(target, held_out, workplace / "again")
        for exit_layer in (2, 3):
            path = heads / f"exit_head_{exit_layer}.safetensors"
            training = read_facts(path).training
            assert training is not None
            for figures, head in (
                (training.after, load_exit_head(path, target, exit_layer)),
                (training.before, None),
            ):
                assert evaluate(target, {exit_layer: head}, texts, 8) == {exit_layer: figures}
            assert training.after.acceptance > training.before.acceptance
            assert (training.steps, training.num_texts, training.temperature) == (12, 4 * 12, 1.0)
            assert training.num_tokens == 12 * training.num_texts
            for figure in (training.before.acceptance, training.after.acceptance):
                assert f"{figure:.3f}" in result.stdout

    def test_a_run_is_in_mlflow_and_the_same_command_again_does_nothing(
        self, run_distill: DistillCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert run_distill().exit_code == 0
        before = {path: path.read_bytes() for path in (workplace / "heads").glob("*.safetensors")}

        def never(*args: Any, **options: Any) -> None:
            raise AssertionError("nothing is left to train")

        monkeypatch.setattr(tuner.heads.distill, "train", never)
        again = run_distill()
        assert again.exit_code == 0, again.output
        assert "already trained with these settings: 2, 3" in again.stdout
        assert "acceptance" in again.stdout
        assert before == {path: path.read_bytes() for path in (workplace / "heads").glob("*.safetensors")}
        self._check_mlflow(workplace)

    def _check_mlflow(self, workplace: Path) -> None:
        (run,) = _runs(workplace)
        assert run.info.status == "FINISHED"
        assert run.data.tags["sdtune"] == "distill"
        assert run.data.params["exit_layers"] == "2,3"
        assert run.data.params["steps"] == "12"
        assert {"model", "dataset", "device_name", "version.torch", "seed", "samples"} <= set(run.data.params)
        facts = read_facts(workplace / "heads" / "exit_head_3.safetensors").training
        assert facts is not None
        assert run.data.metrics["exit_3/acceptance_with_head"] == pytest.approx(facts.after.acceptance)
        assert run.data.metrics["exit_3/agreement_without_head"] == pytest.approx(facts.before.agreement)
        assert run.data.metrics["writing_seconds"] > 0
        assert run.data.metrics["training_seconds"] > 0
        client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{workplace.parent / 'mlflow.db'}")
        losses = client.get_metric_history(run.info.run_id, "exit_2/loss")
        assert [point.step for point in losses] == list(range(1, 13))
        folder = Path(run.info.artifact_uri.removeprefix("file://"))
        assert _files(folder) == {"exit_head_2.json", "exit_head_3.json"}

    def test_heads_of_other_exits_and_stored_texts_are_kept(
        self, run_distill: DistillCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert run_distill(exit_layers="2").exit_code == 0
        first = (workplace / "heads" / "exit_head_2.safetensors").read_bytes()

        def never(*args: Any) -> list[GeneratedText]:
            raise AssertionError("the texts are there")

        monkeypatch.setattr("tuner.heads.texts.generate_batch", never)
        assert run_distill(exit_layers="2,4").exit_code == 0
        assert (workplace / "heads" / "exit_head_2.safetensors").read_bytes() == first
        assert (workplace / "heads" / "exit_head_4.safetensors").exists()


class TestRefusals:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"model": None}, ["which model", "--model"]),
            ({"exit_layers": "2,6"}, ["exits at layer 6", "must be 1 to 5"]),
            ({"tuning_prompts": "500"}, ["too few prompts", "500"]),
            ({"steps": "0"}, ["distillation.steps", "greater than or equal to 1", "0"]),
            ({"out": "/dev/null/heads"}, ["/dev/null", "is a file"]),
            ({"tracking_uri": "sqlite:////dev/null/mlflow.db"}, ["cannot use the MLflow store"]),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_one_line_and_nothing_written(
        self, run_distill: DistillCommand, workplace: Path, flags: dict[str, str | None], words: list[str]
    ) -> None:
        refused(run_distill(**flags), *words)
        assert not list(workplace.iterdir())

    def test_too_little_text(self, run_distill: DistillCommand) -> None:
        refused(run_distill(temperature="0", response_tokens="2"), "12 prompts gave 24 tokens", "500 are needed")

    def test_a_damaged_head(self, run_distill: DistillCommand, workplace: Path) -> None:
        (workplace / "heads").mkdir()
        (workplace / "heads" / "exit_head_2.safetensors").write_bytes(b"no head")
        refused(run_distill(), "exit_head_2.safetensors is damaged")

    def test_a_full_disk_leaves_no_half_head(
        self, run_distill: DistillCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = os.fsync

        def full(file: int) -> None:
            if "exit_head_3" in str(Path(f"/proc/self/fd/{file}").readlink()):
                raise OSError(errno.ENOSPC, "No space left on device")
            honest(file)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            refused(run_distill(), "cannot write the exit head", "exit_head_3.safetensors", "No space left on device")
        assert _files(workplace / "heads") == {"exit_head_2.safetensors", "texts", "checkpoint.pt"}
        assert _runs(workplace)[0].info.status == "FAILED"
        monkeypatch.setattr(tuner.heads.distill, "train", lambda run, *args: _at_the_end(run.step))
        assert run_distill().exit_code == 0
        assert "checkpoint.pt" not in _files(workplace / "heads")


def _at_the_end(step: int) -> None:
    assert step == 12


class TestStopping:
    def test_a_killed_run_resumes_to_the_same_weights(
        self, arguments: dict[str, str | None], run_distill: DistillCommand, workplace: Path
    ) -> None:
        assert run_distill(out="whole", steps="40").exit_code == 0
        command = [sys.executable, "-m", "tuner.cli.main", *command_line("distill", {**arguments, "steps": "40"})]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "step 8:" in line:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
        assert "checkpoint.pt" in _files(workplace / "heads")
        assert "exit_head_2.safetensors" not in _files(workplace / "heads")
        result = run_distill(steps="40")
        assert result.exit_code == 0, result.output
        assert "resuming a stopped distillation after step" in result.stderr
        model = Target(AutoModelForCausalLM.from_pretrained(str(arguments["model"])))
        for exit_layer in (2, 3):
            name = f"exit_head_{exit_layer}.safetensors"
            resumed, whole = (load_exit_head(Path(folder) / name, model, exit_layer) for folder in ("heads", "whole"))
            for weight, other in zip(resumed.parameters(), whole.parameters(), strict=True):
                assert weight.equal(other)
        stopped = [run for run in _runs(workplace) if run.info.status != "FINISHED"]
        assert not stopped
        assert len(_runs(workplace)) == 2

    def test_heads_trained_in_groups_are_those_trained_together(
        self, run_distill: DistillCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert run_distill(exit_layers="2-4", out="together").exit_code == 0
        honest = tuner.heads.distill.save_checkpoint

        def stop_in_second_group(run: Run, *args: Any) -> None:
            honest(run, *args)
            if run.students.keys() == {4} and run.step == 8:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(tuner.heads.distill, "save_checkpoint", stop_in_second_group)
            stopped = run_distill(exit_layers="2-4", heads_at_once="2")
        assert stopped.exit_code == 130, stopped.output
        assert "3 heads are trained 2 at a time" in " ".join(stopped.stderr.split())
        assert {"exit_head_2.safetensors", "exit_head_3.safetensors", "checkpoint.pt"} < _files(workplace / "heads")
        resumed = run_distill(exit_layers="2-4", heads_at_once="2")
        assert resumed.exit_code == 0, resumed.output
        assert "resuming a stopped distillation after step 8" in resumed.stderr
        assert "checkpoint.pt" not in _files(workplace / "heads")
        for exit_layer in (2, 3, 4):
            name = f"exit_head_{exit_layer}.safetensors"
            one, other = (load_file(workplace / folder / name) for folder in ("heads", "together"))
            assert one.keys() == other.keys()
            assert all(weight.equal(other[key]) for key, weight in one.items())

    def test_unfinished_work_of_other_settings_is_replaced_only_if_asked(
        self, run_distill: DistillCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        honest = tuner.heads.distill.save_checkpoint

        def stop(*args: Any) -> None:
            honest(*args)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(tuner.heads.distill, "save_checkpoint", stop)
            result = run_distill()
        assert result.exit_code == 130
        assert "stopped; the same command resumes" in result.stderr
        assert "Traceback" not in result.output
        assert _runs(workplace)[0].info.status == "KILLED"
        refused(run_distill(steps="5"), "unfinished distillation with another steps", "--overwrite")
        assert run_distill(steps="5", overwrite=True).exit_code == 0
        refused(run_distill(steps="3"), "exit_head_2.safetensors", "another steps", "--overwrite")
        assert "checkpoint.pt" not in _files(workplace / "heads")
