"""Peak memory beside the weights of an 8B model, by running it with fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from decoding.drafts import EarlyExit, LayerSkip
from decoding.target import Target
from studies.prediction.survey import Survey
from tests.support.fake_8b import GIB, NUM_PARAMETERS, PeakBytes, fake_8b

NUM_SEQUENCES = 4
NUM_WRITTEN = 64
SURVEY_BUDGETS = {512: 0.75, 1_500: 1.75, 4_000: 4.0}
"""GiB by tokens of context. With a copy of the context for each round it took 5, 14 and 34."""


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with fake_8b() as model:
        yield Target(model)


def test_fake_model_has_the_size_of_the_real_one(target: Target) -> None:
    assert target.model.num_parameters() == NUM_PARAMETERS
    with PeakBytes() as memory:
        target.model.get_input_embeddings().weight.clone()
    assert memory.peak == 128256 * 4096 * 2


@pytest.mark.parametrize("context", SURVEY_BUDGETS)
def test_survey_fits_beside_the_model(target: Target, context: int) -> None:
    with PeakBytes() as memory:
        _survey(target, context).record(LayerSkip.blocks((5, 9)))
    assert memory.peak < SURVEY_BUDGETS[context] * GIB


def test_states_of_all_exits_fit_beside_the_model(target: Target) -> None:
    with PeakBytes() as memory:
        survey = _survey(target, 4_000, exits=range(1, target.num_layers))
        survey.record_all([EarlyExit(exit_layer=1), EarlyExit(exit_layer=31)])
    assert memory.peak < 3 * GIB, "they are 4 GiB"


def _survey(target: Target, context: int, exits: Iterable[int] = ()) -> Survey:
    prompts, continuations = [[1] * context] * NUM_SEQUENCES, [[1] * (NUM_WRITTEN + 1)] * NUM_SEQUENCES
    return Survey(target, prompts, continuations, exits=exits)
