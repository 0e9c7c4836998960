"""`sdtune report`: a finished search as one HTML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import ValidationError
from rich.console import Console

from decoding.profile import DraftProfile
from tuner.cli.terminal import print_facts
from tuner.errors import ConfigError
from tuner.fields import DEFAULT_STORE

if TYPE_CHECKING:
    from tuner.review.document import SearchResult


@click.command()
@click.argument("source", metavar="RUN|PROFILE|FILE")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, help="File of the report."
)
@click.option(
    "--tracking-uri", envvar="MLFLOW_TRACKING_URI", default=DEFAULT_STORE, show_default=True, help="MLflow store."
)
def report(source: str, out: Path, tracking_uri: str) -> None:
    """Write the report of a finished search: one HTML file with its verdict, tables and interactive charts.

    SOURCE is the id of the search's run in MLflow, a profile that the search wrote, or a search.json from its artifacts. The file
    needs no network; a search keeps one as an artifact, too.

    \b
    Examples:
      sdtune report profile.yaml
      sdtune report 0123456789abcdef0123456789abcdef --out llama-code.html
    """
    from tuner.output_paths import check_writable

    check_writable(out)
    review = find_review(source, tracking_uri)

    from decoding.documents.atomic_write import write_atomically
    from tuner.review.page import report_page
    from tuner.review.verdict import verdict

    write_atomically(out, report_page(review).encode(), what="the report", error=ConfigError)
    print_facts(Console(), verdict=verdict(review).headline, report=out)


REVIEW_NAME = "search.json"


def find_review(source: str, tracking_uri: str) -> SearchResult:
    """Return the data of the search that `source` names: the id of its run, the path of its profile, or of a search.json.

    Raises `ConfigError` for a source without such data, and `TrackingError` if the store cannot be used.
    """
    path = Path(source)
    if path.suffix == ".json":
        try:
            return _parsed(path.read_text(encoding="utf-8"), source)
        except (OSError, UnicodeDecodeError) as cause:
            raise ConfigError(f"cannot read {path}: {getattr(cause, 'strerror', None) or 'it is no text'}") from None
    run_id = _run_of(path) if path.exists() else source
    if re.fullmatch(r"[0-9a-f]{32}", run_id) is None:
        raise ConfigError(f"{source} is neither a profile, nor the id of a run, nor a {REVIEW_NAME}")

    from tuner.tracking import read_artifact

    text = read_artifact(tracking_uri, run_id, REVIEW_NAME)
    if text is None:
        raise ConfigError(f"the run {run_id} in {tracking_uri} has no {REVIEW_NAME}: it is no finished search")
    return _parsed(text, source)


def _run_of(profile: Path) -> str:
    origin = DraftProfile.load(profile).provenance
    if origin is None or origin.mlflow_run_id is None:
        raise ConfigError(f"the profile {profile} names no MLflow run: give the id of the search's run")
    return origin.mlflow_run_id


def _parsed(text: str, source: str) -> SearchResult:
    from tuner.review.document import SearchResult

    try:
        return SearchResult.model_validate_json(text)
    except ValidationError as failure:
        where = ".".join(map(str, failure.errors(include_url=False)[0]["loc"])) or "its start"
        raise ConfigError(f"{source} holds no data of a search of this version: wrong at {where}") from None
