"""Self-distillation of exit heads: the target writes texts, and a head learns at each exit to foretell them.

EESD (arXiv 2406.03853) is known to us by its abstract: a draft structure behind the first N layers is trained by
self-distillation with the model itself frozen. Texts, loss, schedule and figures are our formulation.
"""
