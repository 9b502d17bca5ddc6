"""dragoman on Ray Serve: a model in several processes, on one machine or on many (`dragoman[ray]`).

serve run dragoman.ray:build model=hf:ORG/REPO replicas=2

Nothing of Ray is imported before an application is built.
"""

from typing import Any


def build(args: dict[str, Any]) -> Any:
    """The application that these arguments ask for; see FleetArguments for what there is."""
    from dragoman.ray.deployments import build_application

    return build_application(args)
