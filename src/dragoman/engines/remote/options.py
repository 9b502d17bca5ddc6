"""What can be set about servers that are used as an engine."""

from msgspec import Struct


class RemoteOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    """The model's public name; by default its name at the upstreams."""
    model: str | None = None
    """Its name at the upstreams; by default the first that they have."""
    key: str | None = None
    """The key of the upstreams."""
    context: int | None = None
    """Tokens one sequence may hold; by default what the upstreams say."""
    connect_s: float = 5.0
    """Seconds for a connection."""
    silence_s: float = 600.0
    """Seconds after which an upstream that says nothing is given up."""
    check_s: float = 5.0
    """Seconds between looks at whether the upstreams are there."""
    tries: int = 3
    """How often a job is given to an upstream, as long as none has said a token."""
