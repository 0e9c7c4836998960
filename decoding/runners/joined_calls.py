"""Joins consecutive calls of compiled code in the graph of a pass, so that they are made from C++."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, fx

from decoding.runners.compiled_kernel import CompiledKernel
from decoding.runners.cpu_calls import Call, ConsecutiveCalls, can_call


def result(values: Sequence[Tensor], index: int) -> Tensor:
    """Return one of the results of a call: the node of a graph behind a call with several."""
    return values[index]


def call(function: ConsecutiveCalls, *given: Tensor) -> list[Tensor]:
    """Return the results of consecutive calls: the function of their node, whose first argument is an input of the graph."""
    return function(*given)


def join_calls(graph: fx.Graph, memory: MutableMapping[fx.Node, Any]) -> None:
    """Replace consecutive calls of compiled code in `graph` by one call each; `memory` are the tensors of its inputs.

    Each joined call is a new last input of the graph. It holds weights: as the target of a node it would keep them until a
    garbage collection, since a graph and its nodes refer to one another. Inputs of the graph may lose all their uses.
    """
    runs = list(_runs(graph))
    if runs and can_call():
        for run in runs:
            _join(graph, run, memory)


def _runs(graph: fx.Graph) -> Iterable[list[fx.Node]]:
    """Yield the calls of compiled code that follow one another, each with the nodes of its results."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if _is_kernel(node) or (node.target is result and node.args[0] in run):
            run.append(node)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _is_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, CompiledKernel) and node.target.entry is not None


def _join(graph: fx.Graph, run: Sequence[fx.Node], memory: MutableMapping[fx.Node, Any]) -> None:
    kernels = [node for node in run if isinstance(node.target, CompiledKernel)]
    results = {(node.args[0], node.args[1]): node for node in run if node.target is result}
    own = set(results.values())
    inputs = [_inputs(node) for node in kernels]
    nodes = dict.fromkeys(each for row in inputs for each in row if isinstance(each, fx.Node) and each not in own)
    numbers = [each for row in inputs for each in row if isinstance(each, Tensor)]
    held, given = [each for each in nodes if each in memory], [each for each in nodes if each not in memory]

    slots: dict[int, int] = {}  # of nodes and tensors, by their identity
    for each in [*held, *numbers, *given, *results.values()]:
        slots.setdefault(id(each), len(slots))
    calls = [
        Call(
            entry=node.target.entry,
            inputs=[slots[id(each)] for each in row],
            outputs=[
                slots[id(results[node, index])] if (node, index) in results else None
                for index in range(node.target.num_outputs)
            ],
        )
        for node, row in zip(kernels, inputs, strict=True)
        if isinstance(node.target, CompiledKernel) and node.target.entry is not None
    ]
    used = [node for node in results.values() if any(user not in run for user in node.users)]
    constants = [*(memory[each] for each in held), *{id(each): each for each in numbers}.values()]
    function = ConsecutiveCalls(calls, constants, len(given), [slots[id(node)] for node in used])
    with graph.inserting_after(list(memory)[-1]):
        holder = graph.placeholder(f"joined_{len(memory)}")
    memory[holder] = function
    with graph.inserting_after(run[-1]):
        joined = graph.call_function(call, (holder, *given))
    for index, node in reversed(list(enumerate(used))):
        with graph.inserting_after(joined):
            node.replace_all_uses_with(graph.call_function(result, (joined, index)))
    for node in reversed(run):
        graph.erase_node(node)


def _inputs(node: fx.Node) -> list[fx.Node | Tensor]:
    """Return the inputs of a call as the C++ function takes them: nodes, and numbers as tensors."""
    assert isinstance(node.target, CompiledKernel)
    tensors = (each for each in node.args if isinstance(each, fx.Node))
    return [next(tensors) if number is None else number for number in node.target.number_tensors]
