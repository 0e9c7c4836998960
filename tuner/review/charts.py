"""The interactive charts of the HTML report, by plotly: each takes a search and returns a figure, or None without data for it.

Colours are Okabe and Ito's, and every state has a marker of its own, so that colour-blind readers and print lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from decoding.profile import Interval
from studies.contract import TrialRecord, TrialState
from studies.measurement import Measurement
from tuner.measuring.contender import PROFILE
from tuner.review.document import SearchResult, trial_name

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, GREY = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"),
    *("#d55e00", "#777777"),
)
SKIPPED = {"kept": "#f2f2f2", "attention skipped": ORANGE, "MLP skipped": SKY, "both skipped": "#1b3a5c"}
"""Colour of each value of a layer: the sum of 1 for skipped attention and 2 for a skipped MLP."""
STUDY_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
MOST_WORDS = 70
"""Characters of a description beside a mark."""
MOST_TICKS = 12
"""Prompts that are counted on an axis, at most."""


def held_out_chart(result: SearchResult) -> go.Figure:
    """Return the speed-ups of the final candidates, and of stock generation, with their intervals."""
    shown: list[tuple[str, Interval, str]] = []
    for rival in result.rivals:
        won = " (winner)" if rival is result.winner else ""
        shown.append((f"{rival.trial}{won}", rival.measurement.speedup_interval(), rival.candidate.describe()))
    if result.comparison is not None:
        for name, each in result.comparison.contenders.items():
            if name != PROFILE:
                shown.append((name, each.over_plain, each.description))
    return _intervals_chart(shown)


def progress_chart(result: SearchResult) -> go.Figure | None:
    """Return the speed-up of each trial in the order in which they ran, and the best so far."""
    measured = [(n, r, r.measurement) for n, r in enumerate(result.trials) if r.measurement and r.repeat_of is None]
    if not measured:
        return None
    figure = go.Figure()
    for number, study in enumerate(dict.fromkeys(record.study for _, record, _ in measured)):
        for state, symbol in ((TrialState.COMPLETE, "circle"), (TrialState.PRUNED, "circle-open")):
            own = [(n, r, m) for n, r, m in measured if r.study == study and r.state is state]
            if own:
                _add_trials(figure, own, study, state, symbol, STUDY_COLOURS[number % len(STUDY_COLOURS)])
    line, best = [], None
    for record in result.trials:
        best = max(filter(None, (best, record.speedup)), default=None)
        line.append(best)
    figure.add_scatter(
        x=list(range(len(line))), y=line, mode="lines", line={"shape": "hv", "color": "#1b3a5c"}, name="best so far"
    )
    for n, record, measurement in measured:
        if trial_name(record) == result.winner.trial:
            square = {"symbol": "square-open", "size": 18, "color": RED, "line": {"width": 3}}
            figure.add_scatter(x=[n], y=[measurement.speedup], mode="markers", marker=square, name="winner")
    figure.add_hline(y=1.0, line_dash="dash", line_color=GREY)
    figure.update_xaxes(dtick=max(1, len(line) // 12))
    return _titled(figure, "trial, in the order they ran", "speed-up on tuning prompts")


def _add_trials(
    figure: go.Figure,
    trials: list[tuple[int, TrialRecord, Measurement]],
    study: str,
    state: TrialState,
    symbol: str,
    colour: str,
) -> None:
    texts = [
        f"{trial_name(r)}: {m.speedup:.2f}<br>{_short(_words(r))}<br>{_short(r.reason or '')}" for _, r, m in trials
    ]
    has_intervals = state is TrialState.COMPLETE and all(len(m.samples) > 1 for _, _, m in trials)
    figure.add_scatter(
        x=[n for n, _, _ in trials],
        y=[m.speedup for _, _, m in trials],
        error_y=_reach([m.speedup_interval() for _, _, m in trials]) if has_intervals else None,
        mode="markers",
        marker={"symbol": symbol, "size": 9, "color": colour},
        name=study if state is TrialState.COMPLETE else f"{study}, pruned",
        hovertext=texts,
        hoverinfo="text",
    )


def time_chart(result: SearchResult) -> go.Figure | None:
    """Return where the time of a token goes, plainly and with the winner, and the bound of one token per pass."""
    confirmed = result.confirmed
    share = confirmed.drafting_share
    if share is None:
        return None
    plain, drafted = 1000 / confirmed.plain_tokens_per_second, 1000 / confirmed.draft_tokens_per_second
    parts = {
        "drafting": ([0.0, drafted * share], SKY, "/"),
        "verifying": ([0.0, drafted * (1 - share)], BLUE, ""),
        "passes of the whole model": ([plain, 0.0], GREY, ""),
    }
    figure = go.Figure()
    for name, (milliseconds, colour, pattern) in parts.items():
        figure.add_bar(
            y=["plain decoding", result.winner.trial],
            x=milliseconds,
            orientation="h",
            name=name,
            marker={"color": colour, "pattern": {"shape": pattern}},
        )
    figure.update_layout(barmode="stack")
    return _titled(figure, "milliseconds per token", "", height=240)


def acceptance_chart(result: SearchResult) -> go.Figure | None:
    """Return the share of rounds that accepted the first, second, third ... drafted token."""
    histogram = result.confirmed.acceptance_histogram
    rounds = sum(histogram.values())
    if not rounds or max(histogram) == 0:
        return None
    positions = list(range(1, max(histogram) + 1))
    shares = [sum(n for length, n in histogram.items() if length >= position) / rounds for position in positions]
    figure = go.Figure(go.Bar(x=positions, y=shares, marker_color=BLUE, showlegend=False))
    figure.update_yaxes(tickformat=".0%", range=[0, 1])
    figure.update_xaxes(dtick=1)
    return _titled(figure, "position in the draft", "share of rounds that accept it")


def prediction_chart(result: SearchResult) -> go.Figure | None:
    """Return the predicted speed-up of each trial against the measured one."""
    pairs = [
        (float(r.notes["predicted_speedup"]), r.measurement.speedup, r)
        for r in result.trials
        if r.measurement is not None and r.repeat_of is None and "predicted_speedup" in r.notes
    ]
    if not pairs:
        return None
    ends = [min(min(p, m) for p, m, _ in pairs), max(max(p, m) for p, m, _ in pairs)]
    figure = go.Figure()
    figure.add_scatter(x=ends, y=ends, mode="lines", line={"dash": "dash", "color": GREY}, name="exact prediction")
    figure.add_scatter(
        x=[predicted for predicted, _, _ in pairs],
        y=[measured for _, measured, _ in pairs],
        mode="markers",
        marker={"size": 9, "color": BLUE},
        hovertext=[f"{trial_name(r)}: {p:.2f} predicted, {m:.2f} measured<br>{_short(_words(r))}" for p, m, r in pairs],
        hoverinfo="text",
        name="trials",
    )
    return _titled(figure, "predicted speed-up", "measured speed-up")


def prompts_chart(result: SearchResult) -> go.Figure:
    """Return the winner's speed-up on each held-out prompt, the lowest first."""
    samples = sorted(result.confirmed.samples, key=lambda sample: sample.ratio)
    figure = go.Figure()
    names = list(dict.fromkeys(sample.category or "held-out prompts" for sample in samples))
    for number, name in enumerate(names):
        own = [(n, s) for n, s in enumerate(samples) if (s.category or "held-out prompts") == name]
        figure.add_scatter(
            x=[n for n, _ in own],
            y=[s.ratio for _, s in own],
            mode="markers",
            marker={"size": 8, "symbol": number % 8, "color": STUDY_COLOURS[number % len(STUDY_COLOURS)]},
            name=name,
            hovertext=[f"prompt {s.prompt}: {s.ratio:.2f}, {s.draft_tokens} tokens" for _, s in own],
            hoverinfo="text",
        )
    figure.add_hline(y=1.0, line_dash="dash", line_color=GREY)
    figure.update_xaxes(dtick=-(-len(samples) // MOST_TICKS))  # there is no half of a prompt
    return _titled(figure, "held-out prompts, the slowest first", "speed-up of decoding")


def layers_chart(result: SearchResult) -> go.Figure | None:
    """Return the layers that the draft of each trial skips, the winner's framed; None if no draft runs a part of the model."""
    num_layers, own = result.profile.target.num_layers, [r for r in result.trials if r.candidate.draft.runs_model]
    drawn = {trial_name(r): r.candidate.draft.skipped(num_layers) for r in own if r.repeat_of is None}
    if not drawn:
        return None
    layers, names = range(num_layers), list(drawn)
    grid = [[(n in skip.skip_attention) + 2 * (n in skip.skip_mlp) for skip in drawn.values()] for n in layers]
    steps = [(share / len(SKIPPED), c) for n, c in enumerate(SKIPPED.values()) for share in (n, n + 1)]
    heatmap = go.Heatmap(
        z=grid, x=names, zmin=0, zmax=len(SKIPPED) - 1, colorscale=steps, showscale=False, xgap=1, ygap=1
    )
    figure = go.Figure(heatmap)
    for name, colour in SKIPPED.items():  # the legend
        figure.add_scatter(x=[None], y=[None], mode="markers", marker={"symbol": "square", "color": colour}, name=name)
    if result.winner.trial in names:
        column = names.index(result.winner.trial)
        frame = {"x0": column - 0.5, "x1": column + 0.5, "y0": -0.5, "y1": num_layers - 0.5}
        figure.add_shape(type="rect", line={"color": RED, "width": 3}, **frame)
    return _titled(figure, "trial", "layer", height=200 + 8 * num_layers)


def categories_chart(result: SearchResult) -> go.Figure | None:
    """Return the winner's speed-up by category of prompts, with intervals; None unless there are two categories."""
    found = result.confirmed.by_category().items()
    shown = [
        (name, each.speedup_interval(), f"{len(each.samples)} prompts") for name, each in found if len(each.samples) > 1
    ]
    return None if len(shown) < 2 else _intervals_chart(shown)


def _intervals_chart(shown: Sequence[tuple[str, Interval, str]]) -> go.Figure:
    """Return intervals one below the other, by name and with a text for each."""
    intervals = [interval for _, interval, _ in shown]
    figure = go.Figure()
    figure.add_scatter(
        x=[interval.value for interval in intervals],
        y=[name for name, _, _ in shown],
        error_x=_reach(intervals),
        mode="markers",
        marker={"size": 11, "color": BLUE},
        hovertext=[f"{interval}<br>{_short(text)}" for _, interval, text in shown],
        hoverinfo="text",
        showlegend=False,
    )
    figure.add_vline(x=1.0, line_dash="dash", line_color=GREY, annotation_text="plain decoding")
    figure.update_yaxes(autorange="reversed")
    return _titled(figure, "speed-up of decoding over plain decoding, 95 % intervals", "", height=150 + 45 * len(shown))


Chart = Callable[[SearchResult], go.Figure | None]

CHARTS: Mapping[str, Chart] = {
    "held_out": held_out_chart,
    "progress": progress_chart,
    "time": time_chart,
    "acceptance": acceptance_chart,
    "prediction": prediction_chart,
    "layers": layers_chart,
    "prompts": prompts_chart,
    "categories": categories_chart,
}
"""By the name under which the template shows each."""


def _reach(intervals: list[Interval]) -> dict[str, Any]:
    """Return the error bars of intervals around their values."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [each.ci95[1] - each.value for each in intervals],
        "arrayminus": [each.value - each.ci95[0] for each in intervals],
    }


def _titled(figure: go.Figure, x: str, y: str, *, height: int = 360) -> go.Figure:
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin={"l": 10, "r": 10, "t": 24, "b": 10},
        font={"family": "sans-serif", "size": 13},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02},
    )
    figure.update_xaxes(title=x, automargin=True)
    figure.update_yaxes(title=y, automargin=True)
    return figure


def _words(record: TrialRecord) -> str:
    return record.candidate.describe(parameters=True)


def _short(text: str) -> str:
    return text if len(text) <= MOST_WORDS else f"{text[: MOST_WORDS - 1]}…"
