"""Self-distillation on tiny random models: generated texts, training, checkpoints, and an unchanged target."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.acceptance import Greedy
from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.errors import DistillationError
from decoding.exit_heads import ExitFigures, new_exit_head
from decoding.target import Target
from decoding.text import Ending
from tests.support.families import build, some_tokens
from tests.support.tiny import tiny_llama, tiny_target
from tuner.config import DistillSettings
from tuner.heads import texts as texts_module
from tuner.heads import training as training_module
from tuner.heads.checkpoint import OtherCheckpointError, load_checkpoint, save_checkpoint
from tuner.heads.texts import (
    GeneratedText,
    Schedule,
    TextPlan,
    TrainingBatch,
    generate_batch,
    generate_texts,
    spread_order,
)
from tuner.heads.training import Run, Student, acceptance, evaluate, train

PROMPTS = tuple(tuple(some_tokens(3 + seed % 6, seed=seed)) for seed in range(12))
SMALL_PROMPTS = tuple(tuple(token % 64 for token in prompt) for prompt in PROMPTS)
SETTINGS = DistillSettings(steps=30, batch_size=6, learning_rate=1e-2)


def plan_of(prompts: tuple[tuple[int, ...], ...] = SMALL_PROMPTS, **changes: Any) -> TextPlan:
    defaults = {"samples": 2, "temperature": 1.0, "response_tokens": 12, "batch_size": 5, "seed": 0}
    return TextPlan(prompts=prompts, **{**defaults, **changes})


def generated_by(target: Target, **changes: Any) -> list[GeneratedText]:
    plan = plan_of(**changes)
    return [text for number, batch in enumerate(plan.batches) for text in generate_batch(target, batch, plan, number)]


def trained(target: Target, texts: list[GeneratedText], *exits: int, settings: DistillSettings = SETTINGS) -> Run:
    run = Run({exit_layer: Student(new_exit_head(target)) for exit_layer in exits})
    train(run, target, texts, settings, seed=0)
    return run


def figures(
    target: Target, heads: dict[int, Any], texts: list[GeneratedText], batch_size: int = 6
) -> dict[int, ExitFigures]:
    return evaluate(target, heads, texts, batch_size)


def weights(run: Run, exit_layer: int) -> list[Tensor]:
    return [weight.detach().clone() for weight in run.students[exit_layer].head.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class TestTexts:
    def test_greedy_texts_equal_plain_decoding(self) -> None:
        target = tiny_target()
        texts = generated_by(target, samples=1, temperature=0.0)
        assert {text.prompt for text in texts} == set(SMALL_PROMPTS)
        for text in texts:
            request = Request(list(text.prompt), Ending(12, frozenset()), Greedy())
            assert list(text.response) == list(plain_decoder(target).generate(request).tokens)

    def test_sampled_texts_vary_and_repeat_for_a_seed(self) -> None:
        target = tiny_target()
        texts = generated_by(target)
        assert texts == generated_by(target)
        assert texts != generated_by(target, seed=1)
        assert len({text.response for text in texts if text.prompt == SMALL_PROMPTS[0]}) == 2

    def test_sampling_leaves_the_random_state_alone(self) -> None:
        target = tiny_target()
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        generated_by(target)
        assert torch.equal(torch.rand(3), expected)

    def test_an_end_of_text_token_is_the_last_one(self) -> None:
        plain = tiny_llama()
        plain.generation_config.eos_token_id = 7
        texts = generated_by(Target(plain), response_tokens=40)
        ended = [text for text in texts if len(text.response) < 40]
        assert ended
        assert all(text.response[-1] == 7 for text in ended)
        assert not any(7 in text.response[:-1] for text in texts)

    def test_generation_settings_of_the_checkpoint_are_ignored(self) -> None:
        model = tiny_llama()
        model.generation_config.update(repetition_penalty=5.0, top_k=1, min_new_tokens=3, max_length=4, num_beams=2)
        before = model.generation_config.to_dict()
        assert generated_by(Target(model)) == generated_by(tiny_target())
        assert model.generation_config.to_dict() == before

    def test_texts_stay_within_the_context(self) -> None:
        prompt = tuple(token % 64 for token in some_tokens(250))
        assert [len(text.response) for text in generated_by(tiny_target(), prompts=(prompt,), samples=1)] == [6]


class TestTextsOnDisk:
    def test_what_is_missing_is_generated_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target, folder = tiny_target(), tmp_path / "texts"
        whole = generate_texts(target, plan_of(), folder)
        assert len(whole) == 24
        numbers: list[int] = []

        def counted(target: Target, prompts: Any, plan: TextPlan, number: int) -> list[GeneratedText]:
            numbers.append(number)
            return generate_batch(target, prompts, plan, number)

        monkeypatch.setattr(texts_module, "generate_batch", counted)
        for number in spread_order(5)[2:]:
            (folder / f"{number}.json").unlink()
        assert generate_texts(target, plan_of(), folder) == whole
        assert numbers == spread_order(5)[2:]
        assert generate_texts(target, plan_of(), folder) == whole
        assert len(numbers) == 3

    @pytest.mark.parametrize(
        "wrong", ["{}", "[", '[{"response": [], "seconds": 0}]', '[{"response": [1e3], "seconds": 0}]']
    )
    def test_a_damaged_file_is_named(self, wrong: str, tmp_path: Path) -> None:
        (tmp_path / "0.json").write_text(wrong)
        with pytest.raises(DistillationError, match=r"0.json are damaged: remove"):
            generate_texts(tiny_target(), plan_of(SMALL_PROMPTS[:1], samples=1), tmp_path)


class TestBatches:
    def test_the_mask_selects_positions_that_predict_the_response(self) -> None:
        texts = [GeneratedText((1, 2, 3), (4, 5)), GeneratedText((6,), (7, 8, 9)), GeneratedText((1, 2), (3,))]
        batch = TrainingBatch.of(texts, torch.device("cpu"))
        assert batch.token_ids.shape == (3, 4)
        assert batch.first == 0
        for row, text in enumerate(texts):
            positions = batch.response_mask[row].nonzero()[:, 0] + batch.first
            following = torch.tensor([*text.prompt, *text.response])[positions + 1]
            assert tuple(following.tolist()) == text.response

    def test_every_epoch_has_each_text_once_in_a_new_order(self) -> None:
        texts = [GeneratedText((1,) * (1 + number % 9), (number,)) for number in range(40)]
        schedule = Schedule(texts, batch_size=6, seed=0)
        passes = [
            [text for step in range(7 * epoch, 7 * epoch + 7) for text in schedule.texts_of(step)] for epoch in (0, 1)
        ]
        assert all(sorted(seen, key=texts.index) == texts for seen in passes)
        assert passes[0] != passes[1]
        assert Schedule(texts, 6, seed=0).texts_of(9) == schedule.texts_of(9)
        assert Schedule(texts, 6, seed=1).texts_of(9) != schedule.texts_of(9)


class TestFigures:
    def test_acceptance_is_the_shared_mass(self) -> None:
        p, q = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]), torch.tensor([[0.2, 0.3, 0.5], [0.25, 0.75, 0.0]])
        assert torch.allclose(acceptance(p.log(), q.log()), torch.tensor([0.7, 0.25]))

    def test_an_exit_that_equals_the_model_has_perfect_figures(self) -> None:
        target = tiny_target()
        texts = generated_by(target)
        found = figures(target, {5: target.blocks[-1], 2: None}, texts, 5)
        assert found[5].agreement == 1.0
        assert found[5].acceptance == pytest.approx(1.0, abs=1e-4)
        assert 0.0 < found[2].acceptance < 1.0

    def test_figures_are_token_means_at_any_batch_size(self) -> None:
        target = tiny_target()
        texts = generated_by(target)
        alone = [figures(target, {2: None}, [text], 1)[2] for text in texts]
        for batch_size in (1, 7):
            together = figures(target, {2: None}, texts, batch_size)[2]
            assert together.agreement == pytest.approx(sum(one.agreement for one in alone) / len(alone))
            assert together.acceptance == pytest.approx(sum(one.acceptance for one in alone) / len(alone), abs=1e-5)


class TestTraining:
    def test_the_loss_falls_and_acceptance_rises(self) -> None:
        target = tiny_target()
        unseen = generated_by(target, prompts=tuple(prompt[::-1] for prompt in SMALL_PROMPTS), seed=9)
        run = trained(target, generated_by(target), 1, 3)
        for exit_layer, student in run.students.items():
            losses = [of_step[exit_layer] for of_step in run.losses]
            assert sum(losses[-5:]) < sum(losses[:5])
            without = figures(target, {exit_layer: None}, unseen)[exit_layer]
            untrained = figures(target, {exit_layer: new_exit_head(target)}, unseen)[exit_layer]
            after = figures(target, {exit_layer: student.stored_head()}, unseen)[exit_layer]
            gain = after.acceptance - max(without.acceptance, untrained.acceptance)
            assert gain > {1: 0.02, 3: 0.01}[exit_layer]

    def test_the_loss_is_zero_for_an_exit_that_equals_the_model(self) -> None:
        target = tiny_target()
        run = trained(target, generated_by(target), 2, 5, settings=SETTINGS.model_copy(update={"steps": 1}))
        assert run.losses[0][5] == pytest.approx(0.0, abs=1e-5)
        assert run.losses[0][2] > 0.01

    def test_exits_trained_together_equal_exits_trained_alone(self) -> None:
        target = tiny_target()
        texts = generated_by(target)
        settings = SETTINGS.model_copy(update={"steps": 4})
        together = trained(target, texts, 1, 2, 4, settings=settings)
        for exit_layer in (1, 2, 4):
            alone = trained(target, texts, exit_layer, settings=settings)
            assert same(weights(together, exit_layer), weights(alone, exit_layer))
            assert [of_step[exit_layer] for of_step in together.losses] == [loss[exit_layer] for loss in alone.losses]

    def test_training_leaves_the_target_unchanged(self) -> None:
        target = tiny_target()
        embeddings = target.model.get_input_embeddings().weight.requires_grad_(False)
        before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
        trained(target, generated_by(target), 2, settings=SETTINGS.model_copy(update={"steps": 2}))
        assert all(torch.equal(before[name], tensor) for name, tensor in target.model.state_dict().items())
        required = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
        assert len(required) == len(list(target.model.parameters())) - 1
        assert not embeddings.requires_grad
        assert all(parameter.grad is None for parameter in target.model.parameters())

    def test_a_failed_training_leaves_the_target_unchanged(self) -> None:
        target = tiny_target()
        run = Run({2: Student(new_exit_head(target))})
        with torch.no_grad():
            run.students[2].masters[0].fill_(math.nan)
        with pytest.raises(DistillationError, match=r"loss of exit 2 is nan at step 1.*lower learning rate"):
            train(run, target, generated_by(target), SETTINGS, seed=0)
        assert all(parameter.requires_grad for parameter in target.model.parameters())

    def test_a_target_of_lower_precision(self) -> None:
        dtype = torch.float16
        target = Target(tiny_llama().to(dtype))
        texts = generated_by(target)
        run = trained(target, texts, 2)
        student = run.students[2]
        assert {weight.dtype for weight in student.head.parameters()} == {dtype}
        assert {master.dtype for master in student.masters} == {torch.float32}
        assert any(
            (master != weight).any() for master, weight in zip(student.masters, student.head.parameters(), strict=True)
        )
        before = figures(target, {2: None}, texts)[2]
        assert figures(target, {2: student.stored_head()}, texts)[2].acceptance > before.acceptance + 0.02

    @pytest.mark.parametrize("family", ["gpt_neox_parallel", "gemma3"])
    def test_other_families(self, family: str) -> None:
        target = Target(build(family))
        texts = generated_by(target, prompts=PROMPTS)
        run = trained(target, texts, 2, settings=SETTINGS.model_copy(update={"steps": 15}))
        losses = [of_step[2] for of_step in run.losses]
        assert sum(losses[-4:]) < sum(losses[:4])

    def test_a_timeout_compresses_the_schedule(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter(range(10_000))  # a step takes a second
        monkeypatch.setattr(training_module.time, "perf_counter", lambda: float(next(clock)))
        rates: list[float] = []

        def noted(self: Student, num_tokens: int, learning_rate: float) -> None:
            rates.append(learning_rate)
            self.optimizer.zero_grad()

        target = tiny_target()
        monkeypatch.setattr(Student, "update", noted)
        texts = [GeneratedText((1, 2), (3, 4))]
        run = trained(target, texts, 2, settings=DistillSettings(steps=1000, timeout="12s", learning_rate=1.0))
        assert run.step == 12
        assert run.seconds == 12.0
        assert max(rates) > 0.9
        assert rates[-1] < 0.05


IDENTITY = {"model": ["a", "b"], "steps": 10, "learning_rate": 1e-2}
TEN_STEPS = SETTINGS.model_copy(update={"steps": 10})


class TestCheckpoints:
    @pytest.fixture
    def stopped(self, tmp_path: Path) -> tuple[Target, list[GeneratedText], Path]:
        """Training of ten steps, stopped after the sixth, with its last checkpoint after the fourth."""
        target = tiny_target()
        texts = generated_by(target)
        run, path = (
            Run({1: Student(new_exit_head(target)), 3: Student(new_exit_head(target))}),
            tmp_path / "checkpoint.pt",
        )

        def stop() -> None:
            if run.step == 4:
                save_checkpoint(run, IDENTITY, path)
            if run.step == 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(run, target, texts, TEN_STEPS, seed=0, on_step=stop)
        return target, texts, path

    @pytest.mark.parametrize("exits", [(1, 3), (3,)])
    def test_resumed_training_gives_the_same_weights_and_losses(self, stopped: Any, exits: tuple[int, ...]) -> None:
        target, texts, path = stopped
        resumed = Run({exit_layer: Student(new_exit_head(target)) for exit_layer in exits})
        load_checkpoint(resumed, IDENTITY, path)
        assert resumed.step == 4
        assert resumed.seconds > 0
        train(resumed, target, texts, TEN_STEPS, seed=0)
        whole = trained(target, texts, 1, 3, settings=TEN_STEPS)
        for exit_layer in exits:
            assert same(weights(resumed, exit_layer), weights(whole, exit_layer))
            assert [of[exit_layer] for of in resumed.losses] == [of[exit_layer] for of in whole.losses]

    def test_a_checkpoint_of_another_distillation_is_refused(self, stopped: Any) -> None:
        target, _, path = stopped
        other = {**IDENTITY, "steps": 9, "learning_rate": 2.0}
        with pytest.raises(OtherCheckpointError, match="another learning rate and steps"):
            load_checkpoint(Run({1: Student(new_exit_head(target))}), other, path)
        with pytest.raises(OtherCheckpointError, match="another choice of exits"):
            load_checkpoint(Run({2: Student(new_exit_head(target))}), IDENTITY, path)

    def test_a_damaged_checkpoint_is_refused(self, stopped: Any) -> None:
        target, _, path = stopped
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DistillationError, match=r"checkpoint.pt is damaged.*remove it"):
            load_checkpoint(Run({1: Student(new_exit_head(target))}), IDENTITY, path)

    def test_a_full_disk_keeps_the_last_checkpoint(self, stopped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        target, _, path = stopped
        before = path.read_bytes()

        def full(state: Any, file: Any) -> None:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(DistillationError, match=r"cannot write the checkpoint .*No space left on device"):
            save_checkpoint(Run({1: Student(new_exit_head(target))}), IDENTITY, path)
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == ["checkpoint.pt"]
