"""A device in another process: its requests and answers are plain data, and its trials those of a bench in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.drafts import LayerSkip
from studies.contract import Candidate
from studies.measurement import PromptSample
from tests.support.benches import ScriptedBench, bench_on, first_block, per_token
from tests.support.records import candidate, sample
from tuner.executors.contract import DeviceLostError, RemoteTrialError
from tuner.executors.remote import RemoteBench, RemoteWatch
from tuner.executors.worker import DeviceSpec, DeviceWorker
from tuner.inputs.environment import device_name, versions
from tuner.inputs.models import load
from tuner.measuring.paired import Bench


def asker(worker: DeviceWorker) -> Callable[..., dict[str, Any]]:
    """Calls the worker as another process would: with copies of plain data."""

    def ask(method: str, *arguments: Any) -> dict[str, Any]:
        answer = worker.ask(method, *json.loads(json.dumps(arguments)))
        if "lost" in answer:
            raise DeviceLostError(answer["lost"])
        copy: dict[str, Any] = json.loads(json.dumps(answer))
        return copy

    return ask


def scripted(answer: Callable[[Candidate, int], PromptSample]) -> tuple[RemoteBench, ScriptedBench]:
    """A bench in a worker, and the one that it stands for."""
    bench, worker = ScriptedBench(answer), DeviceWorker()
    worker._bench = bench
    return RemoteBench(asker(worker), bench.indices), bench


def _by_block(wanted: Candidate, index: int) -> PromptSample:
    return sample(1.0 + first_block(wanted) / 10 + index / 100, index)


def test_samples_are_those_of_the_bench_one_by_one() -> None:
    remote, bench = scripted(_by_block)
    seen: list[PromptSample] = []
    measured = remote.measure(candidate((3,)), range(4), on_sample=seen.append)
    assert measured == bench.measure(candidate((3,)), range(4))
    assert tuple(seen) == measured.samples
    assert remote.indices == bench.indices


def test_the_search_may_end_a_measurement_after_any_sample() -> None:
    asked: list[int] = []

    def answer(wanted: Candidate, index: int) -> PromptSample:
        asked.append(index)
        return sample(1.0, index)

    remote, _ = scripted(answer)

    def stop(each: PromptSample) -> None:
        if each.prompt == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remote.measure(candidate(), range(4), on_sample=stop)
    assert asked == [0, 1]
    assert len(remote.measure(candidate(), range(3)).samples) == 3, "the next measurement begins anew"


def test_a_failure_is_told_in_its_own_words_and_the_device_goes_on() -> None:
    def answer(wanted: Candidate, index: int) -> PromptSample:
        if first_block(wanted) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to")
        return _by_block(wanted, index)

    remote, _ = scripted(answer)
    with pytest.raises(RemoteTrialError, match=r"^OutOfMemoryError: CUDA out of memory\.$"):
        remote.measure(candidate((4,)), range(2))
    assert len(remote.measure(candidate((3,)), range(2)).samples) == 2


def test_a_rule_is_warmed_up_on_the_device() -> None:
    remote, bench = scripted(_by_block)
    assert remote.warm_up_rule(candidate(), range(2)).draft_length.persistent
    assert bench.warmed_up_on == [(0, 1)]


def test_a_process_that_was_started_again_says_so() -> None:
    remote = RemoteBench(asker(DeviceWorker()), range(2))
    with pytest.raises(DeviceLostError, match="started again"):
        remote.measure(candidate(), range(2))


@pytest.fixture
def bench_here(checkpoint: Path, heads_folder: Path) -> Bench:
    from decoding.target import Target

    prompts = [[5, 6, 7], [8, 9, 10, 11], [12, 13]]
    return bench_on(Target(load(str(checkpoint), device="cpu").model), prompts, clock=per_token(plain=2.0))


@pytest.fixture
def heads_folder(tmp_path: Path) -> Path:
    return tmp_path / "heads"


@pytest.fixture
def spec(bench_here: Bench, checkpoint: Path, heads_folder: Path) -> DeviceSpec:
    from decoding.fingerprint import fingerprint

    target, baseline = bench_here.target, bench_here.baseline
    return DeviceSpec(
        model=str(checkpoint),
        revision=None,
        dtype="auto",
        device_type="cpu",
        threads=torch.get_num_threads(),
        runner=target.runner.name,
        exact_width=None,
        decoding=bench_here.decoding,
        seed=0,
        most_kept=bench_here.most_kept,
        heads=heads_folder,
        device_name=device_name(target.device),
        precision=str(target.dtype),
        versions=versions(),
        prompts=baseline.prompts,
        continuations=baseline.continuations,
        rows=baseline.rows,
        categories=baseline.categories,
        batch_size=1,
        max_new_tokens=baseline.ending.max_new_tokens,
        eos_token_ids=baseline.ending.eos_token_ids,
        **vars(fingerprint(target.model)),
    )


def test_a_device_loads_the_model_by_itself_and_measures_what_is_measured_here(
    spec: DeviceSpec, bench_here: Bench
) -> None:
    worker = DeviceWorker()
    assert worker.open(spec.model_dump_json(), per_token(plain=2.0)) == {}
    remote, watch = RemoteBench(asker(worker), bench_here.indices), RemoteWatch(asker(worker))
    wanted = candidate((1,))
    assert isinstance(wanted.draft, LayerSkip)
    watch.begin()
    measured = remote.measure(wanted, bench_here.indices)
    assert watch.found() is None or "processors" in str(watch.found())
    assert measured.is_lossless
    assert measured == bench_here.measure(wanted, bench_here.indices)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weights_sha256": "0" * 64}, "weights sha256"),
        ({"device_name": "NVIDIA H100"}, "in place of NVIDIA H100"),
        ({"versions": {"sdtune": "1", "torch": "2", "transformers": "3"}}, "in place of 3"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_a_device_that_is_not_like_the_others_is_refused(spec: DeviceSpec, change: dict[str, Any], told: str) -> None:
    answer = DeviceWorker().open(spec.model_copy(update=change).model_dump_json())
    assert told in answer["error"]
