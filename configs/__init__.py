"""Data: shipped configurations and the demo. A package only so that an installed sdtune finds its presets."""
