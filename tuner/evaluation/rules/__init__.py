"""Draft-length rules compared on one draft."""
