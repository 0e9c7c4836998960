"""A table of draft kinds: each alone and combined, predicted and measured, and what each adds to the others."""
