"""What the evaluation of executors finds wrong with a search on devices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.records import record
from tuner.evaluation.executors.run import ExecutedSearch, KillingNodes, problems_of

LOCAL = ExecutedSearch("local", {"draft": "a"}, (record(1.1, number=0), record(1.2, number=1)), 1.0)


def _found(**changes: Any) -> ExecutedSearch:
    facts: dict[str, Any] = {"name": "ray", "winner": LOCAL.winner, "records": LOCAL.records, "seconds": 2.0}
    return ExecutedSearch(**{**facts, **changes})


def test_a_search_with_the_same_winner_and_trials_is_right() -> None:
    assert problems_of(_found(), LOCAL) == []


def test_another_winner_and_lost_and_failed_trials_are_told() -> None:
    assert problems_of(_found(winner={"draft": "b"}), LOCAL) == [
        "ray: the winner is {'draft': 'b'}, not {'draft': 'a'}"
    ]
    lost = problems_of(_found(records=LOCAL.records[:1]), LOCAL)
    assert lost == ["ray: {'conf_layers': 1} trials, not {'conf_layers': 2}"]
    failed = problems_of(_found(records=(LOCAL.records[0], record(None, number=1))), LOCAL)
    assert failed == ["ray: trial 1 of conf_layers failed: it broke"]


def test_facts_say_where_trials_ran_and_which_were_redone() -> None:
    redone = record(1.2, number=1, notes={"device": "planted 1", "attempts": 2})
    facts = _found(records=(record(1.1, notes={"device": "planted 0"}), redone)).facts()
    assert facts["on_devices"] == {"planted 0": 1, "planted 1": 1}
    assert facts["redone"] == 1


def test_nodes_are_killed_in_turn_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.evaluation.executors.run.MOST_SECONDS_LATER", 0.0)

    class Cluster:
        def __init__(self) -> None:
            self.done: list[str] = []

        def remove_node(self, node: str, *, allow_graceful: bool) -> None:
            assert not allow_graceful
            self.done.append(f"killed {node}")

        def add_node(self, **settings: Any) -> str:
            self.done.append("added")
            return "new"

    cluster = Cluster()
    with KillingNodes(cluster, ["first", "second"], kills=3, seed=0) as killing:
        for number in range(15):
            killing.trial(record(number=number), None)
            for timer in killing._killing:
                timer.join()
    assert cluster.done == ["killed first", "added", "killed second", "added", "killed new", "added"]
