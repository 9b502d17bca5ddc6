"""Batches: many requests that run in the background, line by line, and their storage."""
