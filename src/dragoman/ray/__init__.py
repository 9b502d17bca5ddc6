"""dragoman on Ray Serve: a model in several processes, on one machine or many (`dragoman[ray]`).

serve run dragoman.ray:build model=hf:ORG/REPO replicas=2

Ray is imported only when an application is built.
"""

from typing import Any


def build(args: dict[str, Any]) -> Any:
    """Build the application that the arguments describe; see `FleetArguments`."""
    from dragoman.ray.deployments import build_application

    return build_application(args)
