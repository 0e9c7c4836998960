"""Fixtures of all tests.

Each test process uses one torch thread, because several threads on few cores wait for each other. Nothing heavy is imported up
here: the process that only hands out tests to others reads this file before it starts them.
"""

import gc
from collections import defaultdict

import pytest

# Collecting cycles visits all objects of torch and MLflow each time: with the usual thresholds, that is a tenth of some tests.
gc.set_threshold(100_000, 50, 100)

# Failing assertions in shared code show their values too.
pytest.register_assert_rewrite("tests.support")


FAMILIES = {"llama", "gemma3", "gpt_neox_parallel"}
"""Families of the default run: full attention; windows and norms around branches; tuple blocks that run in parallel."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other families of tests that have all of these; `.ci/run` runs them where one test covers most of the code."""
    by_test: dict[str, list[tuple[pytest.Item, object]]] = defaultdict(list)
    for item in items:
        if (call := getattr(item, "callspec", None)) is not None:
            by_test[item.nodeid.split("[")[0]].append((item, call.params.get("family")))
    for each in by_test.values():
        if {family for _, family in each if isinstance(family, str)} >= FAMILIES:
            for item, family in each:
                if family not in FAMILIES:
                    item.add_marker("every_family")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the static runner without its compiler, which takes half a minute."""
    monkeypatch.setattr("decoding.runners.static.CompiledBlocks", lambda *_: None)
