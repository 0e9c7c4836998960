"""How often a speed-up is claimed where there is none, and how often intervals hold the true value."""
