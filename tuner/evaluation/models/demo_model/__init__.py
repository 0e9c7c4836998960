"""The demo model: its recipe, corpus, training and report. What a run leaves is a stock transformers folder."""
