"""Choosing what to keep: other patterns than 2:4, calibrated methods, permuted columns."""
