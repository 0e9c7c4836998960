"""What a reviewer reads about a search: its result as one document, verdict, tables, the MLflow description and the HTML report.

Pure functions of data. Imports neither `tuner.search`, which gathers the data, nor `tuner.bench`, nor MLflow.
"""
