"""Consecutive calls of compiled code made from C++: the same results, the same memory, and clear errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from decoding.kernels.calls import Call, CompiledKernel, ConsecutiveCalls, KernelCall, join_calls, kernel_calls, result
from decoding.runners.compilation import CompiledBlocks, compiling
from decoding.runners.contract import Outputs
from decoding.runners.tape import Tapes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports


class Block(nn.Module):
    """Reads its weight, adds to what it keeps, and returns what it read."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([number, 2 * number]))
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, states: Tensor) -> Tensor:
        self.kept.add_(states[0])
        return states * self.weight + self.kept


@pytest.fixture(scope="module")
def compiled() -> CompiledBlocks:
    """Return compiled blocks, one graph for all tests."""
    blocks = CompiledBlocks(torch.device("cpu"))
    with torch.inference_mode(), compiling(blocks):
        for _ in range(2):
            blocks(Block(1.0), torch.ones(3, 2), (), {})
    return blocks


@pytest.fixture
def layers() -> list[Block]:
    return [Block(float(number)) for number in (2, 3, 5)]


def reset(layers: list[Block]) -> None:
    for block in layers:
        block.kept.zero_()


def passes(blocks: CompiledBlocks, layers: list[Block], given: Tensor) -> Callable[[], Outputs]:
    """Return a pass: two blocks, an operator that is not compiled, and another block."""

    def run() -> Outputs:
        states = blocks(layers[1], blocks(layers[0], given, (), {}), (), {})
        return Outputs(blocks(layers[2], states.flip(0), (), {}), states)

    return run


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the functions that tapes call, joined calls among them."""
    seen: list[object] = []

    def joined(graph: fx.Graph, memory: dict[fx.Node, object]) -> None:
        join_calls(graph, memory)
        seen.extend(node.target for node in graph.nodes if node.op == "call_function")
        seen.extend(memory.values())

    monkeypatch.setattr("decoding.runners.tape.join_calls", joined)
    return seen


@torch.inference_mode()
def test_joined_calls_compute_the_same_bits(
    compiled: CompiledBlocks, layers: list[Block], functions: list[object]
) -> None:
    given = torch.randn(3, 2)
    run = passes(compiled, layers, given)
    _, play = Tapes(compiled).record(run)
    assert not any(isinstance(each, CompiledKernel) for each in functions), "all calls are made from C++"
    assert sum(isinstance(each, ConsecutiveCalls) for each in functions) == 2, (
        "the operator between them is not compiled"
    )
    for _ in range(3):
        given.copy_(torch.randn(3, 2))
        reset(layers)
        expected = run()
        kept = [block.kept.clone() for block in layers]
        reset(layers)
        found = play()
        assert torch.equal(found.logits, expected.logits)
        assert found.states is not None
        assert expected.states is not None
        assert torch.equal(found.states, expected.states)
        assert all(torch.equal(block.kept, own) for block, own in zip(layers, kept, strict=True))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Leave objects in cycles alive: what holds weights must not be among them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@torch.inference_mode()
@pytest.mark.usefixtures("no_collection")
def test_weights_and_results_are_freed_at_once(compiled: CompiledBlocks, layers: list[Block]) -> None:
    outputs, play = Tapes(compiled).record(passes(compiled, layers, torch.ones(3, 2)))
    kept_alive = weakref.ref(layers[0].weight), weakref.ref(play().logits)
    del outputs
    layers.clear()
    assert kept_alive[0]() is not None, "a tape keeps its memory"
    assert kept_alive[1]() is None, "and no results"
    del play
    assert kept_alive[0]() is None


def one_call(compiled: CompiledBlocks, block: Block, **changed: Tensor) -> ConsecutiveCalls:
    """Return the compiled block as a function of its states, with some inputs changed: weight, kept or sizes."""
    given = torch.ones(3, 2)
    with kernel_calls() as made:
        compiled(block, given, (), {})
    kernel = CompiledKernel(made[0])
    assert kernel.entry is not None
    names = {block.weight.data_ptr(): "weight", block.kept.data_ptr(): "kept", given.data_ptr(): "states"}
    tensors = iter(made[0].tensors)
    inputs = [names[next(tensors).data_ptr()] if number is None else "sizes" for number in kernel.number_tensors]
    sizes = next(number for number in kernel.number_tensors if number is not None)
    constants = {"weight": block.weight, "kept": block.kept, "sizes": sizes, **changed}
    slots = {name: slot for slot, name in enumerate([*constants, "states", "outputs"])}
    call = Call(kernel.entry, [slots[name] for name in inputs], [slots["outputs"]])
    return ConsecutiveCalls([call], list(constants.values()), num_given=1, returned=[slots["outputs"]])


@torch.inference_mode()
def test_threads_share_one_function(compiled: CompiledBlocks) -> None:
    function = one_call(compiled, Block(3.0), weight=torch.tensor([2.0, 5.0]), kept=torch.zeros(2))
    wrong: list[int] = []

    def work(number: int) -> None:
        states = torch.zeros(3, 2)
        states[1] = number
        for _ in range(200):
            (found,) = function(states)
            if found[1].tolist() != [2.0 * number, 5.0 * number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@torch.inference_mode()
def test_a_failing_call_is_an_error_and_the_next_one_works(compiled: CompiledBlocks) -> None:
    block, states = Block(3.0), torch.zeros(3, 2)
    failing = one_call(compiled, block, sizes=torch.ones(2))  # two numbers where compiled code reads one
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a compiled block failed: "):
            failing(states)
    block.kept.zero_()
    assert one_call(compiled, block)(states)[0].shape == (3, 2)


def test_code_with_more_around_it_is_called_from_python() -> None:
    def counts(inputs: list[Tensor]) -> list[int]:
        return [len(inputs)]

    call = KernelCall(counts, (torch.ones(1), 4), [torch.ones(1)])
    assert CompiledKernel(call).entry is None
    graph = fx.Graph()
    given = graph.placeholder("given")
    node = graph.call_function(CompiledKernel(call), (given,))
    graph.output(graph.call_function(result, (node, 0)))
    before = str(graph)
    join_calls(graph, {given: torch.ones(1)})
    assert str(graph) == before
