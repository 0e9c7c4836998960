"""What a reviewer reads about a search: its data as one document, the verdict, the MLflow description and the HTML report.

Pure functions of data. Imports neither `tuner.search`, which gathers the data, nor `tuner.bench`, nor MLflow.
"""
