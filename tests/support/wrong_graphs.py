"""Recorders with a defect each, which a check of recordings must find."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.fake_graphs import FakeGraph, FakeGraphs


class WrongGraphs(FakeGraphs):
    """Fake graphs whose replays are wrong while `is_wrong`."""

    def __init__(self, *, is_wrong: bool = True) -> None:
        super().__init__()
        self.is_wrong = is_wrong

    def play(self, graph: FakeGraph) -> Any:
        return self.play_wrongly(graph) if self.is_wrong else super().play(graph)

    def play_wrongly(self, graph: FakeGraph) -> Any:
        raise NotImplementedError


class EmptyGraphs(WrongGraphs):
    """Replays compute nothing, as those of a recording on another device's stream: outputs stay what they were."""

    def play_wrongly(self, graph: FakeGraph) -> Any:
        return graph.recorded_outputs.copied()


class SharingGraphs(WrongGraphs):
    """Outputs stay in the memory of the recording, which later passes use."""

    def play_wrongly(self, graph: FakeGraph) -> Any:
        graph.replay()
        graph.finish()
        return graph.outputs


class UnpoisonedGraphs(WrongGraphs):
    """Outputs stay in the memory of the recording, and nothing shows it."""

    def play_wrongly(self, graph: FakeGraph) -> Any:
        graph.replay()
        return graph.outputs


class ForgetfulGraphs(WrongGraphs):
    """Replays lose what they write to memory of others, such as keys and values."""

    def play_wrongly(self, graph: FakeGraph) -> Any:
        with torch.inference_mode():
            memories = [external.tensor() for external in graph.externals.values()]
            contents = [memory.clone() for memory in memories]
            outputs = FakeGraphs.play(self, graph)
            for memory, content in zip(memories, contents, strict=True):
                memory.copy_(content)
        return outputs
