"""Drift: whether a profile still has its speed-up in production, judged by what production servers report.

Pure: documents and statistics. Imports `decoding` and `studies.ratios`; nothing here measures, stores or talks to a server.
"""
