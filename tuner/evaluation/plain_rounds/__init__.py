"""`sdtune evaluate plain-rounds`: what plain rounds of a server with a profile cost. Imports `decoding` and the tuner's inputs."""
