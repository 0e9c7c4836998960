"""`sdtune report`: a finished search as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from tuner.cli.terminal import print_facts
from tuner.profile_address import DEFAULT_STORE


@click.command()
@click.argument("source", metavar="RUN|PROFILE|FILE")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, help="File of the report."
)
@click.option(
    "--tracking-uri", envvar="MLFLOW_TRACKING_URI", default=DEFAULT_STORE, show_default=True, help="MLflow store."
)
@click.option(
    "--bench",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A bench.json of the profile, whose contenders then join verdict and tables.",
)
@click.option(
    "--track", is_flag=True, help="Also replace report and description of the search's run in MLflow, with the bench."
)
def report(source: str, out: Path, tracking_uri: str, bench: Path | None, track: bool) -> None:
    """Write the report of a finished search: one HTML file with its verdict, tables and interactive charts.

    SOURCE is the id of the search's run in MLflow, a profile that the search wrote, or a search.json from its artifacts. The file
    needs no network; a search keeps one as an artifact, too.

    \b
    Examples:
      sdtune report profile.yaml
      sdtune report profile.yaml --bench bench/bench.json --track
      sdtune report 0123456789abcdef0123456789abcdef --out llama-code.html
    """
    from tuner.output_paths import check_writable
    from tuner.review_source import REVIEW_NAME, find_review

    check_writable(out)
    review = find_review(source, tracking_uri)

    from decoding.documents.atomic_write import write_atomically
    from tuner.errors import ConfigError
    from tuner.review.bench_figures import read_comparison
    from tuner.review.markdown import search_note
    from tuner.review.page import report_page
    from tuner.review.verdict import verdict
    from tuner.tracking import replace_review

    if bench is not None:
        comparison = read_comparison(bench, review.profile.name)
        review = review.model_copy(update={"comparison": comparison})
    page = report_page(review)
    write_atomically(out, page.encode(), what="the report", error=ConfigError)
    if track:
        note = search_note(review, profile_path=str(review.settings["out"]))
        texts = {"report.html": page, REVIEW_NAME: review.model_dump_json(by_alias=True)}
        replace_review(tracking_uri, review.run_id, note, texts)
    print_facts(Console(), verdict=verdict(review).headline, report=out)
