"""The blocks that ConfLayers skips, from the confidence of each block: pure functions and the passes that they read."""
