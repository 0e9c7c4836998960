"""Fixtures of all tests.

Each test process uses one torch thread, because several threads on few cores wait for each other. Nothing heavy is imported up
here: the process that only hands out tests to others reads this file before it starts them.
"""

import gc

import pytest

# Collecting cycles visits all objects of torch and MLflow each time: with the usual thresholds, that is a tenth of some tests.
gc.set_threshold(100_000, 50, 100)

# Failing assertions in shared code show their values too.
pytest.register_assert_rewrite("tests.support")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the static runner without its compiler, which takes half a minute."""
    monkeypatch.setattr("decoding.runners.static.CompiledBlocks", lambda *_: None)
