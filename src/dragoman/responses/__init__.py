"""Responses: created, stored, continued and retrieved. HTTP and WebSockets are in `http/`."""
