"""`CudaGraphs` on a model of torch.cuda: failed captures, two devices, streams, cuBLAS workspaces and memory pools."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from decoding.runners.graphs import CudaGraphs
from tests.support.stub_cuda import NUM_STREAMS, Memory, StubCuda, stub_cuda


@pytest.fixture
def cuda() -> Iterator[StubCuda]:
    with stub_cuda() as stub:
        yield stub


@pytest.fixture
def graphs(cuda: StubCuda) -> CudaGraphs:
    return CudaGraphs(torch.device("cuda", 0))


@dataclass
class TimesTen:
    """A pass: ten times its input, by way of cuBLAS."""

    cuda: StubCuda
    given: float = 1.0
    device: int = 0
    num_runs: int = 0
    """How often its kernel has run."""

    def __call__(self) -> Memory:
        result = self.cuda.allocate(self.device)

        def kernel() -> None:
            self.num_runs += 1
            result.value = 10 * self.given

        self.cuda.multiply(self.device, kernel)
        return result

    def waiting(self) -> Memory:
        """Read the result on the host, as a rotary embedding does that looks at the length."""
        result = self()
        self.cuda.wait(self.device)
        return result


def record_well(graphs: CudaGraphs, run: TimesTen) -> Callable[[], Memory]:
    """Record a pass, and check that its replays compute."""
    num_recorded = graphs.num_recorded
    run.given = 1.0
    outputs, play = graphs.record(run)
    assert outputs.value == 10.0
    for given in (2.0, 3.0):
        run.given, num_runs = given, run.num_runs
        assert play().value == 10 * given
        assert run.num_runs == num_runs + 1
    assert graphs.num_recorded == num_recorded + 1
    return play


# --- recording --------------------------------------------------------------------------------------------------------


def test_recording_runs_and_replays_the_pass_once_and_a_replay_computes(cuda: StubCuda, graphs: CudaGraphs) -> None:
    run = TimesTen(cuda)
    graphs.record(run)
    assert run.num_runs == 2, "one warm-up, one replay, which is slower than later ones: a capture runs nothing"
    record_well(graphs, run)
    assert run.num_runs == 6, "the same, and two replays"


def test_outputs_are_copies_outside_the_pool(cuda: StubCuda, graphs: CudaGraphs) -> None:
    run = TimesTen(cuda)
    first, play = graphs.record(run)
    run.given = 2.0
    second, third = play(), play()
    assert (first.value, second.value) == (10.0, 20.0)
    assert second is not third
    assert [each.pool for each in (first, second, third)] == [None] * 3


def test_one_stream_serves_every_warm_up_and_every_capture(cuda: StubCuda, graphs: CudaGraphs) -> None:
    """torch hands out its streams in turns: a new one for each warm-up is the capture's own in the end."""
    plays = [record_well(graphs, TimesTen(cuda)) for _ in range(2 * NUM_STREAMS)]
    assert len(plays) == len(cuda.captures) - 1, "and one capture that keeps the pool"
    assert len({capture.stream for capture in cuda.captures}) == 1
    (stream,) = {capture.stream for capture in cuda.captures}
    assert {line for line in cuda.log if "waits" in line} == {
        f"{stream.number} waits for 0",
        f"0 waits for {stream.number}",
    }
    assert cuda.current_stream().number == 0


def test_replays_on_several_streams_come_one_after_another(cuda: StubCuda, graphs: CudaGraphs) -> None:
    """They write to the same memory, and only work of one stream is in order by itself."""
    play = record_well(graphs, TimesTen(cuda))
    other = cuda.new_stream()
    cuda.log.clear()
    with cuda.on_stream(other):
        play()
        play()
    play()
    assert [line for line in cuda.log if "waits" in line] == [
        f"{other.number} waits for 0",
        f"0 waits for {other.number}",
    ]


def test_other_threads_may_use_the_device_during_a_capture(cuda: StubCuda, graphs: CudaGraphs) -> None:
    graphs.record(TimesTen(cuda))
    assert {capture.error_mode for capture in cuda.captures} == {"thread_local"}


# --- memory -----------------------------------------------------------------------------------------------------------


def test_workspaces_are_cleared_before_and_after_every_capture(cuda: StubCuda, graphs: CudaGraphs) -> None:
    for _ in range(3):
        graphs.record(TimesTen(cuda))
    captures = [line for line in cuda.log if line in ("clear", "begin", "end")]
    assert captures == ["clear", "begin", "end", "clear"] * len(cuda.captures)


def test_destroying_a_recording_frees_no_memory_of_another(cuda: StubCuda, graphs: CudaGraphs) -> None:
    kept = record_well(graphs, TimesTen(cuda))
    workspaces = cuda.captures[-1].workspaces
    dropped = record_well(graphs, TimesTen(cuda))
    cuda.freed.clear()
    del dropped
    assert not [memory for memory in cuda.freed if memory in workspaces]
    kept()


def test_the_pool_outlives_its_recordings(cuda: StubCuda, graphs: CudaGraphs) -> None:
    for _ in range(3):
        play = record_well(graphs, TimesTen(cuda))
        del play
    assert len({capture.pool for capture in cuda.captures}) == 1
    assert [state.num_owners for state in cuda.pools.values()] == [1], "all others have given their share back"


def test_no_garbage_is_collected_during_a_capture(cuda: StubCuda, graphs: CudaGraphs) -> None:
    """A recording in a reference cycle would be destroyed there, which spoils the capture under way."""
    cycle: list[object] = [record_well(graphs, TimesTen(cuda))]
    cycle.append(cycle)
    run = TimesTen(cuda)

    def run_and_allocate() -> Memory:
        nonlocal cycle
        if cuda.capturing is not None:
            cycle = []
            [[] for _ in range(10 * sum(gc.get_threshold()))]
        return run()

    _, play = graphs.record(run_and_allocate)
    run.given = 4.0
    assert play().value == 40.0
    assert gc.isenabled()


# --- failed captures --------------------------------------------------------------------------------------------------


def check_state(cuda: StubCuda, graphs: CudaGraphs, stream: int = 0) -> None:
    """Check that nothing is left of a failed capture, and that the next one succeeds."""
    assert cuda.current_stream().number == stream
    assert cuda.capturing is None
    assert not [pool for pool, state in cuda.pools.items() if state.is_recording]
    cuda.draw()
    record_well(graphs, TimesTen(cuda))


def test_a_pass_that_waits_runs_unrecorded_and_spoils_nothing(cuda: StubCuda, graphs: CudaGraphs) -> None:
    earlier = [record_well(graphs, TimesTen(cuda)) for _ in range(2)]
    run = TimesTen(cuda)
    with pytest.warns(UserWarning, match="runs slower: .*not permitted when stream is capturing"):
        outputs, play = graphs.record(run.waiting)
    assert outputs.value == 10.0
    run.given = 5.0
    assert play().value == 50.0
    check_state(cuda, graphs)
    for each in earlier:
        each()


def test_memory_of_a_failed_capture_is_given_back(cuda: StubCuda, graphs: CudaGraphs) -> None:
    earlier = record_well(graphs, TimesTen(cuda))
    pool = cuda.captures[-1].pool
    with pytest.warns(UserWarning, match="runs slower"):
        graphs.record(TimesTen(cuda).waiting)
    assert cuda.pools[pool].num_owners == 1, "the earlier recording's"
    del earlier
    assert cuda.pools[pool].num_owners == 0
    check_state(cuda, graphs)


@pytest.mark.parametrize("operation", ["capture_begin", "instantiate"])
def test_a_capture_that_torch_refuses_is_reported_with_its_cause(
    cuda: StubCuda, graphs: CudaGraphs, operation: str
) -> None:
    record_well(graphs, TimesTen(cuda))
    cuda.failures[operation] = [RuntimeError("the cause of it all")]
    with pytest.warns(UserWarning, match="runs slower: the cause of it all"):
        graphs.record(TimesTen(cuda))
    check_state(cuda, graphs)


def test_an_error_of_the_pass_itself_is_raised(cuda: StubCuda, graphs: CudaGraphs) -> None:
    def broken() -> Memory:
        TimesTen(cuda)()
        raise ValueError("no such layer")

    with cuda.on_stream(cuda.new_stream()):
        stream = cuda.current_stream().number
        with pytest.raises(ValueError, match="no such layer"):
            graphs.record(broken)
        assert f"{stream} waits for" in cuda.log[-1], "what the caller does next comes after the work of the pass"
        check_state(cuda, graphs, stream)


def test_an_error_in_the_capture_that_is_no_errors_of_cuda_is_raised(cuda: StubCuda, graphs: CudaGraphs) -> None:
    earlier = record_well(graphs, TimesTen(cuda))
    run = TimesTen(cuda)

    def interrupted() -> Memory:
        if cuda.capturing is not None:
            raise KeyboardInterrupt
        return run()

    with pytest.raises(KeyboardInterrupt):
        graphs.record(interrupted)
    check_state(cuda, graphs)
    earlier()


# --- out of memory ----------------------------------------------------------------------------------------------------


def fail_in_capture(cuda: StubCuda, run: TimesTen, errors: list[RuntimeError]) -> Callable[[], Memory]:
    """Return the pass, which fails with the next error whenever it is captured."""

    def failing() -> Memory:
        if cuda.capturing is not None and errors:
            raise errors.pop(0)
        return run()

    return failing


def test_memory_is_made_available_when_a_capture_finds_none(cuda: StubCuda, graphs: CudaGraphs) -> None:
    """A capture cannot take memory that the allocator keeps for other work."""
    run = TimesTen(cuda)
    outputs, play = graphs.record(fail_in_capture(cuda, run, [torch.OutOfMemoryError("CUDA out of memory")]))
    assert cuda.log.count("empty cache") == 1
    run.given = 2.0
    assert (outputs.value, play().value) == (10.0, 20.0)
    check_state(cuda, graphs)


@pytest.mark.parametrize("num_before", [0, 2])
def test_out_of_memory_is_raised_and_leaves_a_usable_recorder(
    cuda: StubCuda, graphs: CudaGraphs, num_before: int
) -> None:
    earlier = [record_well(graphs, TimesTen(cuda)) for _ in range(num_before)]
    errors: list[RuntimeError] = [torch.OutOfMemoryError("CUDA out of memory") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError):
        graphs.record(fail_in_capture(cuda, TimesTen(cuda), errors))
    check_state(cuda, graphs)
    for each in earlier:
        each()


def test_a_graph_for_which_the_driver_has_no_memory_is_out_of_memory(cuda: StubCuda, graphs: CudaGraphs) -> None:
    """Graphs lie in the driver's own memory: torch has not allocated it, and its error is another one."""
    record_well(graphs, TimesTen(cuda))
    cuda.failures["instantiate"] = [torch.AcceleratorError("CUDA error: out of memory") for _ in range(2)]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA error: out of memory"):
        graphs.record(TimesTen(cuda))
    assert cuda.log.count("empty cache") == 1
    check_state(cuda, graphs)


# --- two devices ------------------------------------------------------------------------------------------------------


def test_recordings_of_the_second_device_are_made_and_replayed_there(cuda: StubCuda) -> None:
    graphs = CudaGraphs(torch.device("cuda", 1))
    assert cuda.current_device() == 0
    play = record_well(graphs, TimesTen(cuda, device=1))
    assert {capture.stream.device.index for capture in cuda.captures} == {1}
    assert "empty" not in cuda.log
    play()
    assert {line for line in cuda.log if "replay" in line} == {"replay on device 1"}
    assert cuda.current_device() == 0
    assert [cuda.current_stream(index).number for index in range(2)] == [0, 0]


def test_a_failed_capture_of_the_second_device_ends_there(cuda: StubCuda) -> None:
    graphs = CudaGraphs(torch.device("cuda", 1))
    with pytest.warns(UserWarning, match="runs slower"):
        graphs.record(TimesTen(cuda, device=1).waiting)
    assert not [pool for pool, state in cuda.pools.items() if state.is_recording]
    record_well(graphs, TimesTen(cuda, device=1))


def test_a_device_without_an_index_is_the_current_one_at_first(cuda: StubCuda) -> None:
    with cuda.on_device(1):
        graphs = CudaGraphs(torch.device("cuda"))
        record_well(graphs, TimesTen(cuda, device=1))
    record_well(graphs, TimesTen(cuda, device=1))
    assert {capture.stream.device.index for capture in cuda.captures} == {1}
