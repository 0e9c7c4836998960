"""Models made for evaluation: the demo model's recipe and widened models."""
