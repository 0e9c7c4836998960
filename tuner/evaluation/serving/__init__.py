"""`sdtune evaluate serving`: a running server under load, by the `openai` client. Imports `decoding` and the tuner's inputs."""
