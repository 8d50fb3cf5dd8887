"""Weights in the formats of other tools: dense FP8 with scales, and compressed-tensors' bitmask."""
