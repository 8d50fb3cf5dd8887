"""sp24: 2:4 sparse weights in FP8 and 16-bit types for Hopper GPUs."""

__version__ = "0.1.0"
