"""Heads of a finished search that another search takes: named by its id, held by their contents.

A request names no file. The worker copies the heads into the folder of its job, so that heads which the job distils beside them
leave the other search as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.errors import ExitHeadError
from decoding.exit_heads import FEATURE_HEAD, file_sha256, head_name
from tuner.service.admission import HEADS
from tuner.service.contract import JOB_ID, JobState, ServiceError
from tuner.service.jobs import Jobs


class GivenHeads(Document):
    """The heads of a search, as the job that takes them keeps them."""

    search: str = Field(pattern=JOB_ID)
    files: dict[str, str] = Field(min_length=1, description="SHA-256 of each head, by the name of its file.")


def heads_of(search: str, jobs: Jobs, folder: Path) -> GivenHeads:
    """Return the heads of a finished search; `folder` holds the folders of the jobs.

    Raises `UnknownJobError` for a search that does not exist, and `ServiceError` for one that is not finished, has no heads, or has
    some that cannot be read.
    """
    found = jobs.find(search)
    if found.state is not JobState.FINISHED:
        raise ServiceError(f"heads: the search {search} is {found.state}: its heads can be taken when it is finished")
    try:
        files = {path.name: file_sha256(path) for path in _head_files(folder / search / HEADS)}
    except ExitHeadError as cause:
        raise ServiceError(f"heads: {cause}") from None
    if not files:
        raise ServiceError(f"heads: the search {search} has none: it has distilled none and was given none")
    return GivenHeads(search=search, files=files)


def has_heads(search: str, folder: Path) -> bool:
    """Return True if a search has distilled heads, or was given some; `folder` holds the folders of the jobs."""
    return any(_head_files(folder / search / HEADS))


def place_heads(given: GivenHeads, job: str, folder: Path) -> None:
    """Copy the heads into the folder of `job`, those that are there aside.

    Raises `ServiceError` if one has been removed or replaced since the job was submitted.
    """
    own = folder / job / HEADS
    own.mkdir(parents=True, exist_ok=True)
    for name, sha256 in given.files.items():
        if (own / name).exists() and file_sha256(own / name) == sha256:
            continue
        source, partial = folder / given.search / HEADS / name, own / f".{name}.partial"
        if not source.exists() or file_sha256(source) != sha256:
            raise ServiceError(
                f"heads: {name} of the search {given.search} was removed or replaced after this search was submitted: submit it "
                "again"
            )
        shutil.copyfile(source, partial)
        partial.replace(own / name)


def _head_files(folder: Path) -> Iterator[Path]:
    """Yield the files of heads in a folder that need not exist, by name."""
    pattern = head_name(0).replace("0", "*")
    for path in sorted([*folder.glob(pattern), *folder.glob(FEATURE_HEAD)]):
        # Not a link: it could lead out of the folder.
        if path.is_file() and not path.is_symlink():
            yield path
