"""Predicting speed-ups without decoding: surveys of texts, replays of rules, and the searches guided by them."""
