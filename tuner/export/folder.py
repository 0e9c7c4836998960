"""The folder of an export, written whole or not at all; and a model folder that decodes with a profile.

A model folder has weights, profile, heads, and `custom_generate/generate.py`: for `generate(..., custom_generate=DIR,
trust_remote_code=True)` and `transformers serve DIR`. Nothing of the profile is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard

from tuner.errors import ExportError
from tuner.export import folder_generate
from tuner.export.losses import LOSSES
from tuner.output_paths import check_folder_writable

if TYPE_CHECKING:
    from decoding.profile import DraftProfile

READABLE = 0o755
WEIGHTS = (".safetensors", ".bin")
DISTRIBUTION = "sdtune"


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raise `ExportError` unless the export can be written to `out`. Only an earlier export is ever replaced."""
    check_folder_writable(out.parent, what="the export", error=ExportError)
    if out.exists() and not out.is_dir():
        raise ExportError(f"cannot write the export to {out}: it is a file; name a folder")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ExportError(f"{out} is not empty: name another folder, or replace an earlier export with --overwrite")
    if not (out / LOSSES).exists():
        raise ExportError(f"{out} is no earlier export (it has no {LOSSES}), and is not replaced: name another folder")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder beside `out` that takes its place if the context ends without an error.

    Raises `ExportError` if files cannot be written; then `out` is as it was, and nothing else remains.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        building = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            building.chmod(READABLE)
            yield building
            _replace(out, building)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as cause:
        raise ExportError(f"cannot write the export {out}: {cause.strerror or cause}") from None


def _replace(out: Path, building: Path) -> None:
    """Give `building` the name `out`; an earlier export is removed last."""
    if not out.exists():
        building.rename(out)
        return
    earlier = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent)) / out.name
    out.rename(earlier)
    building.rename(out)
    shutil.rmtree(earlier.parent)


def write_model_folder(
    profile: DraftProfile, profile_folder: Path, model_folder: Path, building: Path, *, copy_weights: bool
) -> None:
    """Write the folder: links to the weights of `model_folder`, or copies, and copies of all its other files and of the heads."""
    for path in sorted(model_folder.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix in WEIGHTS and not copy_weights:
            (building / path.name).symlink_to(path.resolve())
        else:
            shutil.copyfile(path, building / path.name)
    for name in profile.draft.files:
        shutil.copyfile(profile_folder / name, building / name)
    custom = building / "custom_generate"
    custom.mkdir()
    shutil.copyfile(folder_generate.__file__, custom / "generate.py")
    (custom / "requirements.txt").write_text(f"{DISTRIBUTION}\n", encoding="utf-8")
    _write_card(building, profile)
    (building / LOSSES).write_text(
        f"# {profile.name} as a model folder\n\nNothing is lost: sdtune decodes, with {profile.draft.describe()} and "
        f"{profile.draft_length.describe()}. The process needs the package `{DISTRIBUTION}`, and runs one call at a time.\n",
        encoding="utf-8",
    )


USAGE = """
## Faster generation

This folder decodes by a profile of sdtune, {draft}: token for token what the model itself writes, in fewer passes.

```python
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
output = model.generate(**inputs, custom_generate="{name}", trust_remote_code=True)
```

It needs the package `{package}`, from its sources or a wheel: it is not on PyPI. `transformers serve` runs the folder as it is.
"""
"""The section of the model card, by the hub's convention for `custom_generate`."""


def _write_card(building: Path, profile: DraftProfile) -> None:
    """Add tags and usage to the model's card, or write one."""
    path = building / "README.md"
    card = (
        ModelCard.load(path)
        if path.exists()
        else ModelCard(f"---\nlibrary_name: transformers\n---\n# {profile.name}\n")
    )
    card.data["tags"] = [*dict.fromkeys([*(card.data.get("tags") or []), "custom_generate", "speculative-decoding"])]
    card.text += USAGE.format(draft=profile.draft.describe(), name=profile.name, package=DISTRIBUTION)
    card.save(path)
