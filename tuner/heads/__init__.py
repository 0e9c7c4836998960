"""Exit heads: finding and checking them, and training them by self-distillation."""
