"""Responses: made, kept, continued and found again. No socket: `http/responses` speaks to clients."""
