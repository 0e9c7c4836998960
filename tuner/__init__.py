"""Loads, measures, runs the studies, tracks, reports, confirms and writes the profile; the command line is here."""
