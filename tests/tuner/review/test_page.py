"""The HTML report."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from decoding.draft_length import Fixed
from decoding.drafts import EarlyExit, PromptLookup
from studies.contract import Candidate
from studies.measurement import Measurement
from tests.support.records import record, sample
from tests.support.reviews import review, stock
from tuner.review.charts import CHARTS
from tuner.review.document import SearchResult
from tuner.review.page import report_page


class _Words(HTMLParser):
    """The text of a page without scripts and styles, and the addresses that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self._silent = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent = tag in ("script", "style")
        self.loads += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        self._silent = False

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)


def _full() -> SearchResult:
    samples = tuple(
        sample(1.4 + 0.01 * n, n, drafting_seconds=0.3, accepted_lengths=(1, 1, 3), category="ab"[n % 2])
        for n in range(8)
    )
    made = review(comparison=stock(hf=1.6))
    winner = made.rivals[0].model_copy(update={"measurement": Measurement(samples=samples)})
    ended = {"conf_layers": "<script>alert(1)</script>"}
    return made.model_copy(update={"rivals": (winner, made.rivals[1]), "ended": ended})


@pytest.fixture(scope="module")
def page() -> str:
    return report_page(_full())


def test_one_file_has_everything_and_loads_nothing(page: str) -> None:
    found = _Words()
    found.feed(page)
    words = " ".join(found.words)
    assert page.index("times as fast as plain") < page.index("<script>"), "the verdict does not wait for the charts"
    assert "m on d · " in words
    for wanted in (
        *("Ship: 1.43", "Progress of the search", "Where the time of a token goes", "Acceptance by position"),
        *(
            "Predicted against measured",
            "Speed-up by category",
            "Layers that the drafts skip",
            "trials 10 s, race 5.0 s",
            "hf",
        ),
        *(
            "pruned: slower than the best",
            "failed: it broke",
            "won the race",
            "sdtune search --model m",
        ),
    ):
        assert wanted in words, wanted
    assert found.loads == []


def test_text_of_others_is_not_run(page: str) -> None:
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_skipped_layers_are_drawn_by_trial_with_the_winner_framed() -> None:
    exit_at_4 = Candidate(draft=EarlyExit(exit_layer=4), draft_length=Fixed())
    lookup = Candidate(draft=PromptLookup(), draft_length=Fixed())
    trials = (
        record(1.4, number=0),
        record(1.1, number=1, candidate=exit_at_4),
        record(1.0, number=2, candidate=lookup),
        record(1.4, number=3, repeat_of=0),
    )
    figure = CHARTS["layers"](review(trials=trials))
    assert figure is not None
    assert list(figure.data[0].x) == ["conf_layers/0", "conf_layers/1"]
    assert [[row[column] for row in figure.data[0].z] for column in (0, 1)] == [[0, 0, 3, 3, 0, 0], [0, 0, 0, 0, 3, 3]]
    (frame,) = figure.layout.shapes
    assert (frame.x0, frame.x1) == (-0.5, 0.5)
    assert CHARTS["layers"](review(trials=trials[2:3])) is None


def test_every_chart_draws_what_it_has() -> None:
    assert all(draw(_full()) is not None for draw in CHARTS.values())
    shares = CHARTS["acceptance"](_full()).data[0].y  # type: ignore[union-attr]
    assert list(shares) == pytest.approx([0.8, 0.6])


def test_a_report_without_optional_data_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")
    lookup = Candidate(draft=PromptLookup(), draft_length=Fixed())
    made = review(
        objection="its 95 % interval does not lie above 1", trials=(record(1.4, candidate=lookup),), stages={}
    )
    page = report_page(made)
    assert "Do not ship" in page
    assert "Where the time" not in page


def test_prompts_are_counted_in_whole_numbers() -> None:
    figure = CHARTS["prompts"](_full())
    assert figure is not None
    assert figure.layout.xaxis.dtick == 1
