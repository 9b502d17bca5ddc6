"""From a row of logits to an id, for every engine that has the logits in its hands."""
