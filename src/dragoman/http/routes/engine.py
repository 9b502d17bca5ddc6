"""The routes for those who train the model: pause the engine, change its weights, resume."""

from dragoman.api import weights
from dragoman.engines.protocol import weights_of
from dragoman.http.exchange import Exchange
from dragoman.http.host import Host


async def pause(host: Host, exchange: Exchange) -> None:
    """Answered when nothing computes any more."""
    await exchange.read(weights.read_pause)
    await host.brake.pause()
    await exchange.json(weights.state(paused=True, version=weights_of(host.engine)))


async def resume(host: Host, exchange: Exchange) -> None:
    request, _ = await exchange.read(weights.read_resume)
    await host.brake.resume(request.weight_version)
    await exchange.json(weights.state(paused=False, version=weights_of(host.engine)))
