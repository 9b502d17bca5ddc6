"""Choice of a replica for a request: the one that has its prefix cached, unless that one is overloaded."""

from dragoman.routing.key import RoutingKey, digest_hint, key_of_body, key_of_ids
from dragoman.routing.router import Router

__all__ = ["Router", "RoutingKey", "digest_hint", "key_of_body", "key_of_ids"]
