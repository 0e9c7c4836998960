"""`sdtune evaluate hardening`: bad input, fuzzed documents, kills, random losslessness cases and threads. Imports the search."""
