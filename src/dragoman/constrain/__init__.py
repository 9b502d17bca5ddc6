"""What an answer must look like: schemas, expressions, grammars and calls, as masks over token ids."""
