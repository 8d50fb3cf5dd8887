"""Measuring: what to multiply, how to time it, and what the times mean. Nothing here prints."""
