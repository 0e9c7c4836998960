"""Kernels of our own for a CPU, C++ sources and what calls them, chosen in `decoding.kernels.choice`."""
