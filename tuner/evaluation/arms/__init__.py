"""`sdtune evaluate arms`: what the choice of arms is worth when text and load change. Imports `decoding` and the tuner's inputs."""
