"""Tests of `sdtune evaluate suite`."""
