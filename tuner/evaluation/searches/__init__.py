"""Searches compared on one problem at equal budgets."""
