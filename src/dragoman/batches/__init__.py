"""Many requests that nobody waits for: their lines while they are answered, and where batches are kept."""
