"""Triton kernels, one family a file, each beside its plain torch twin of the same signature."""
