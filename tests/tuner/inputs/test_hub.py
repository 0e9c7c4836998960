"""Models on the hub, before one is loaded. The hub is a port of this machine that nobody listens on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tuner.errors import ConfigError
from tuner.inputs.model_folder import check_on_hub

COMMIT = "a" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a hub that cannot be reached."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _put(cache: Path) -> None:
    """Put the configuration of a model into the cache, as a download does."""
    repository = cache / "models--owner--name"
    for path, text in ((f"snapshots/{COMMIT}/config.json", "{}"), ("refs/main", COMMIT)):
        (repository / path).parent.mkdir(parents=True)
        (repository / path).write_text(text)


def test_an_unreachable_hub_is_asked_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no such model: owner/name is neither .* nor available from the hub"):
        check_on_hub("owner/name")
    assert "Retry" not in "".join(capsys.readouterr())


def test_folders_and_models_in_the_cache_are_not_asked_for(cache: Path, tmp_path: Path) -> None:
    check_on_hub(str(tmp_path))
    _put(cache)
    check_on_hub("owner/name")
    check_on_hub("owner/name", COMMIT)
    with pytest.raises(ConfigError, match="no such model"):
        check_on_hub("owner/name", "b" * 40)


@pytest.mark.usefixtures("cache")
def test_a_name_that_no_repository_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such model"):
        check_on_hub("a..b")
