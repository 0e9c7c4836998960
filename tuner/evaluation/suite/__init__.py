"""`sdtune evaluate suite`: models, tasks and methods in one table, cell by cell."""
