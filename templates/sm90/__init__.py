"""Warp-specialised Gluon kernels for Hopper."""
