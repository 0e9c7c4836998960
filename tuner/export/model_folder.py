"""A complete model folder that decodes with a profile: weights, profile, heads, and `custom_generate/generate.py`.

For `generate(..., custom_generate=DIR, trust_remote_code=True)` and `transformers serve DIR`. Nothing of the profile is lost.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.export import folder_generate
from tuner.export.losses import LOSSES

if TYPE_CHECKING:
    from decoding.profile import DraftProfile

WEIGHTS = (".safetensors", ".bin")
CUSTOM = "custom_generate"
DISTRIBUTION = "sdtune"


def write_model_folder(
    profile: DraftProfile, profile_folder: Path, model_folder: Path, building: Path, *, copy_weights: bool
) -> None:
    """Write the folder: links to the weights of `model_folder`, or copies, and copies of all its other files and of the heads."""
    for path in sorted(model_folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):
            _add(path, building / path.name, link=path.suffix in WEIGHTS and not copy_weights)
    for name in profile.draft.files:
        shutil.copyfile(profile_folder / name, building / name)
    custom = building / CUSTOM
    custom.mkdir()
    shutil.copyfile(folder_generate.__file__, custom / "generate.py")
    (custom / "requirements.txt").write_text(f"{DISTRIBUTION}\n", encoding="utf-8")
    (building / LOSSES).write_text(_losses(profile), encoding="utf-8")


def _add(path: Path, copied: Path, *, link: bool) -> None:
    if link:
        copied.symlink_to(path.resolve())
    else:
        shutil.copyfile(path, copied)


def _losses(profile: DraftProfile) -> str:
    return (
        f"# {profile.name} as a model folder\n\nNothing is lost: sdtune decodes, with {profile.draft.describe()} and "
        f"{profile.draft_length.describe()}. The process needs the package `{DISTRIBUTION}`, and runs one call at a time.\n"
    )
