"""Which of several replicas gets a request: who knows its beginning, unless that one has too much to do."""

from dragoman.routing.key import RoutingKey, digest_hint, key_of_body, key_of_ids
from dragoman.routing.router import Router

__all__ = ["Router", "RoutingKey", "digest_hint", "key_of_body", "key_of_ids"]
