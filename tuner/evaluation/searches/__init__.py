"""Comparison of searches on one problem at equal budgets."""
