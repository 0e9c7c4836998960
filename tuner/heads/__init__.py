"""Exit heads: find and check stored ones, train new ones by self-distillation."""
