"""A profile in a registry that is replaced while the server runs."""

from __future__ import annotations

from pathlib import Path

from decoding.errors import ProfileError
from decoding.serving.alias_watch import AliasWatch


def test_each_new_version_is_taken_over_once_and_an_outage_is_survived() -> None:
    answers: list[Path | None] = [Path("1"), Path("2"), None, Path("2"), Path("3"), Path("1")]
    taken: list[Path] = []

    def fetch() -> Path:
        answer = answers.pop(0)
        if answer is None:
            raise ProfileError("no answer")
        return answer

    watch = AliasWatch(fetch, Path("1"), taken.append, seconds=60)
    while answers:
        watch.look()
    assert taken == [Path("2"), Path("3"), Path("1")]


def test_watch_stops_at_once() -> None:
    watch = AliasWatch(lambda: Path("1"), Path("1"), lambda _: None, seconds=3600)
    watch.start()
    watch.stop()
    watch._thread.join(timeout=30)
    assert not watch._thread.is_alive()


def test_a_version_that_cannot_be_taken_over_does_not_end_the_watch() -> None:
    answers, taken = [Path("2"), Path("3")], list[Path]()

    def take_over(path: Path) -> None:
        if path == Path("2"):
            raise ValueError("a draft that cannot be built")
        taken.append(path)

    watch = AliasWatch(lambda: answers.pop(0), Path("1"), take_over, seconds=60)
    watch.look()
    watch.look()
    assert taken == [Path("3")]
