"""One small file a family."""
