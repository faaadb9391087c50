"""Sources that all architectures share: the templates, and the kernels that cast to FP8 and project."""
