"""The Responses API over HTTP: making responses, keeping them, and giving them out again."""
