"""Every class of causal language model that transformers can build tiny: the text of `generate`, or a refusal of one line.

Takes minutes, so that a run without `-m model_classes` leaves it out: `pytest -n 0 -m model_classes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from decoding.deploy import load_decoder
from decoding.draft_length import Fixed
from decoding.drafts import Draft, EarlyExit, LayerSkip, PlainDecoding, PromptLookup
from decoding.errors import SdtuneError
from decoding.probe import probe
from decoding.profile import Decoding
from tests.support.model_classes import build_tiny, classes
from tests.support.profiles import profile_of

pytestmark = [pytest.mark.model_classes, pytest.mark.filterwarnings("ignore")]

ONE = torch.tensor([[5, 9, 17, 5, 9, 33, 8]])
PADDED = torch.tensor([[0, 0, 0, 5, 9, 17, 5], [5, 9, 17, 5, 9, 33, 8]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
FEWEST_CLASSES = 60

outcomes: Counter[str] = Counter()
"""Of the classes so far: built and not built; of those built whose test passed: identical throughout, partly or wholly refused."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before, loud = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    yield
    torch.set_num_threads(before)
    transformers.logging.set_verbosity(loud)


def drafts_of(num_layers: int) -> list[tuple[Draft, bool]]:
    """Return each draft with and without prefix reuse, where it has a prefix."""
    middle = max(1, num_layers // 2)
    prefixed = [LayerSkip.blocks([middle]), LayerSkip(skip_attention=(middle,)), EarlyExit(exit_layer=middle)]
    others = [PlainDecoding(), LayerSkip(skip_attention=(0,)), PromptLookup()]
    return [*((draft, True) for draft in others + prefixed), *((draft, False) for draft in prefixed)]


def text_or_refusal(model: PreTrainedModel, draft: Draft, reuse: bool, ids: torch.Tensor) -> torch.Tensor | str:
    profile = profile_of(model, draft, Fixed(max_tokens=3))
    decoder = load_decoder(profile.model_copy(update={"decoding": Decoding(prefix_reuse=reuse)}))
    mask = (ids > 0).long()
    try:
        return decoder.generate(model, ids, attention_mask=mask, **GREEDY)
    except SdtuneError as refusal:
        return str(refusal)


@pytest.mark.parametrize("name", classes())
def test_the_text_is_that_of_generate_or_a_refusal_of_one_line(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    try:
        model = build_tiny(name)
    except Exception as reason:
        outcomes["not built"] += 1
        pytest.skip(f"{name} cannot be built: {type(reason).__name__}: {' '.join(str(reason).split())[:160]}")
    outcomes["built"] += 1
    found = probe(model)
    assert "\n" not in (found.refusal or "")
    num_layers = model.config.get_text_config().num_hidden_layers
    refusals, num_cases = list[str](), 0
    drafts = drafts_of(num_layers)
    for ids, some in ((ONE, drafts), (PADDED, drafts[:4])):
        stock = model.generate(ids, attention_mask=(ids > 0).long(), **GREEDY)
        for draft, reuse in some:
            num_cases += 1
            given = text_or_refusal(model, draft, reuse, ids)
            if isinstance(given, str):
                assert "\n" not in given
                refusals.append(given)
            else:
                assert torch.equal(given, stock), f"{draft.describe()}, prefix reuse {reuse}, {len(ids)} prompts"
    outcome = "identical" if not refusals else "refused" if len(refusals) == num_cases else "partly refused"
    outcomes[outcome] += 1
    record_property("outcome", outcome)
    assert found.is_supported or len(refusals) == num_cases, f"doctor refuses it, a profile does not: {found.refusal}"


def test_enough_classes_are_built() -> None:
    print(f"{len(classes())} classes: {dict(outcomes)}")
    if outcomes["built"] + outcomes["not built"] < len(classes()):
        pytest.skip("some of the classes were left out, or tried by other workers: run the whole file with -n 0")
    assert outcomes["built"] >= FEWEST_CLASSES
