"""The deployments of Ray Serve: replicas that serve a model, and the ingress in front of them.

A replica is an ordinary dragoman server with its own listener on its node, in a separate thread, so that
Ray's work in the process does not delay tokens. It reports its address and load to the ingress periodically,
and that it is leaving when Serve stops it; then it drains like every server. Serve scales by the running and
queued answers that replicas report, because it does not see the requests themselves.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import ray
from msgspec.structs import asdict, replace
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from dragoman import logs
from dragoman.cli.engine import make_served_engine
from dragoman.engines.protocol import kv_usage_of
from dragoman.http.app import App
from dragoman.http.server import run_in_thread
from dragoman.models.catalog import build_pool
from dragoman.ray.arguments import (
    LOOPBACK,
    TAKEN,
    FleetArguments,
    ModelArguments,
    read_arguments,
    settings_of,
)
from dragoman.ray.fleet import Fleet, FleetUpdate, ReplicaHeartbeat
from dragoman.ray.ingress import Ingress
from dragoman.settings import Settings, change_settings

logger = logging.getLogger("dragoman.ray")

DOOR, APPLICATION = "Door", "dragoman"
MOST_TOLD = 1000
"""Responses listed in one report."""
HEALTH_S = 3.0
"""Seconds between Serve's health checks, which bound how soon a dead replica is replaced."""
STOP_S = 15
"""Seconds after draining until a replica is killed."""
QUICK = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Runs the ingress in the replica's main thread, so that writing a token needs no thread switch."""


def build_application(args: Mapping[str, Any]) -> serve.Application:
    """Build the application, for `serve run dragoman.ray:build` and for a Serve YAML. Raises
    SettingsError.
    """
    fleet = read_arguments(args)
    if not fleet.door:
        return _build_doorless(fleet, fleet.models[0])
    models = {_deployment_name(model): model for model in fleet.models}
    replicas = {name: _replicas(fleet, model, name) for name, model in models.items()}
    names = {name: model.name or name for name, model in models.items()}
    settings = _plain(settings_of(fleet, fleet.models[0]))
    door = serve.deployment(serve.ingress()(IngressReplica)).options(
        name=DOOR,
        num_replicas=fleet.doors,
        # Higher than the ingress's own limit: it rejects with a reason, where Serve would queue requests
        # silently.
        max_ongoing_requests=2 * fleet.max_ongoing_requests,
        graceful_shutdown_timeout_s=fleet.drain_s + STOP_S,
        ray_actor_options={"num_cpus": fleet.door_cpus, "runtime_env": {"env_vars": QUICK}},
        logging_config={"enable_access_log": False},
    )
    most = fleet.max_ongoing_requests
    return door.bind(list(names.values()), settings, most, fleet.doors == 1, list(replicas.values()))


def _deployment_name(model: ModelArguments) -> str:
    """Return a valid deployment name: Serve allows no slashes."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in model.name or "model")


def _plain(settings: Settings) -> dict[str, Any]:
    """Convert settings to builtins, without those at their defaults."""
    default = asdict(Settings())
    fields = {name: value for name, value in asdict(settings).items() if value != default[name]}
    built: dict[str, Any] = msgspec.to_builtins(fields)
    return built


def _replicas(fleet: FleetArguments, model: ModelArguments, name: str) -> serve.Application:
    options = _options(fleet, model)
    deployment = serve.deployment(ModelReplica).options(name=name, max_ongoing_requests=64, **options)
    host = LOOPBACK if fleet.local else ""
    return deployment.bind(model.name or name, _plain(settings_of(fleet, model)), fleet.beat_s, host)


def _build_doorless(fleet: FleetArguments, model: ModelArguments) -> serve.Application:
    settings = _plain(settings_of(fleet, model))

    def make_app() -> App:
        chosen = change_settings(Settings(), settings)
        logs.setup(chosen.log_level, chosen.log_json)
        return App(build_pool(chosen, make_served_engine), chosen)

    deployment = serve.deployment(serve.ingress(make_app)()).options(
        name=_deployment_name(model),
        max_ongoing_requests=fleet.max_ongoing_requests,
        logging_config={"enable_access_log": False},
        **_options(fleet, model),
    )
    return deployment.bind()


def _options(fleet: FleetArguments, model: ModelArguments) -> dict[str, Any]:
    """Return the Serve options of a model's replicas."""
    actor: dict[str, Any] = {"num_cpus": model.cpus}
    if model.gpus:
        actor["num_gpus"] = model.gpus
    if model.memory_bytes:
        actor["memory"] = model.memory_bytes
    if model.resources:
        actor["resources"] = model.resources
    env = {**({} if fleet.door else QUICK), **model.env}
    if env:
        actor["runtime_env"] = {"env_vars": env}
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "health_check_period_s": HEALTH_S,
        "graceful_shutdown_timeout_s": fleet.drain_s + STOP_S,
    }
    if model.placement_bundles:
        actor["num_cpus"] = model.placement_bundles[0].get("CPU", 0)
        options["placement_group_bundles"] = model.placement_bundles
        options["placement_group_strategy"] = model.placement_strategy
    if (scale := model.autoscaling) is None:
        options["num_replicas"] = model.replicas
        return options
    bounds = {"min_replicas": scale.min, "max_replicas": scale.max, "target_ongoing_requests": scale.target}
    delays = {"upscale_delay_s": scale.up_delay_s, "downscale_delay_s": scale.down_delay_s}
    # Behind the ingress Serve sees no requests, and scales by reports; without one it counts requests itself.
    policy = AutoscalingPolicy(policy_function=scale_by_answers) if fleet.door else None
    more = {} if policy is None else {"policy": policy}
    options["autoscaling_config"] = AutoscalingConfig(**bounds, **delays, **more)
    return options


def scale_by_answers(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the running and queued answers need, with so many answers each."""
    seen = context.aggregated_metrics or {}
    answers = sum(sum(seen.get(kind, {}).values()) for kind in ("running", "waiting"))
    target = context.config.target_ongoing_requests
    wanted = math.ceil(answers / target)
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, least), most), {}


class ModelReplica:
    """One server of a model, as a Serve replica."""

    _beating: asyncio.Task[None] | None = None

    def __init__(self, model: str, settings: dict[str, Any], beat_s: float, host: str = "") -> None:
        """`host` is the address to listen on; by default the node's address in the cluster."""
        own = {"host": host or ray.util.get_node_ip_address(), "port": 0}
        chosen = change_settings(Settings(), {**settings, **own})
        logs.setup(chosen.log_level, chosen.log_json)
        self._doors = ExitStack()
        self._server = self._doors.enter_context(
            run_in_thread(build_pool(chosen, make_served_engine), chosen)
        )
        context = serve.get_replica_context()
        param, _, port = self._server.address.partition("://")[2].rpartition(":")
        self._told = ReplicaHeartbeat(context.replica_id.unique_id, model, param.strip("[]"), int(port))
        self._app = context.app_name
        self._beat_s = beat_s

    def _beat(self) -> ReplicaHeartbeat:
        host = self._server.app.host
        models = [*host.recorder.metrics.live_models.values()]
        queues, shelves = [live.queue for live in models], [live.adapters for live in models]
        return replace(
            self._told,
            running=sum(queue.running for queue in queues),
            waiting=sum(queue.waiting for queue in queues),
            taken=host.budgets.local_usage(),
            inside=dict(host.admission.limiters["asks"].active_by_key),
            at_work=dict(sum((queue.running_by_key for queue in queues), Counter[str]())),
            making=[*host.responses.runs][:MOST_TOLD],
            kv=max((used for live in models if (used := kv_usage_of(live.engine)) is not None), default=None),
            adapters=[name for shelf in shelves for name in shelf.used],
            most_adapters=sum(len(shelf.all) for shelf in shelves),
        )

    async def check_health(self) -> None:
        """Called by Serve every few seconds; a replica that raises is replaced."""
        if self._beating is None:
            self._beating = asyncio.create_task(self._keep_telling())
        await self._server.call_in_loop(self._server.app.host.check_alive)

    async def _keep_telling(self) -> None:
        while True:
            try:
                await self._tell(await self._server.call_in_loop(self._beat))
            except Exception as error:
                # No ingress runs yet, or any more.
                logger.debug("The ingress was not reached: %s", type(error).__name__)
            await asyncio.sleep(self._beat_s)

    async def _tell(self, beat: ReplicaHeartbeat) -> None:
        handle = serve.get_deployment_handle(DOOR, self._app)
        answers = await handle.broadcast("hear", msgspec.to_builtins(beat)).results_async(
            timeout_s=5 * self._beat_s, return_exceptions=True
        )
        for news in answers:
            if isinstance(news, FleetUpdate):
                await self._server.call_in_loop(self._hear, news)

    def _hear(self, news: FleetUpdate) -> None:
        host = self._server.app.host
        host.budgets.merge_remote_usage(news.taken)
        for live in host.recorder.metrics.live_models.values():
            live.queue.elsewhere = news.at_work

    async def record_autoscaling_stats(self) -> dict[str, float]:
        beat = await self._server.call_in_loop(self._beat)
        return {"running": beat.running, "waiting": beat.waiting}

    async def __del__(self) -> None:
        if self._beating is None:
            # The replica did not start, and Serve has reported why.
            return
        self._beating.cancel()
        try:
            await self._tell(replace(await self._server.call_in_loop(self._beat), leaving=True))
        except Exception as error:
            logger.debug("The ingress was not told of the shutdown: %s", type(error).__name__)
        await asyncio.to_thread(self._doors.close)


class IngressReplica:
    """The ingress of the application."""

    def __init__(
        self, models: list[str], settings: dict[str, Any], most: int, alone: bool, replicas: Sequence[Any]
    ) -> None:
        """`replicas` are the deployments of the models; naming them makes them part of the application."""
        chosen = change_settings(Settings(), settings)
        logs.setup(chosen.log_level, chosen.log_json)
        self._fleet = Fleet(models, alone=alone)
        self._door = Ingress(self._fleet, chosen, most)

    def __serve_build_asgi_app__(self) -> Ingress:
        return self._door

    def hear(self, beat: dict[str, Any]) -> FleetUpdate:
        return self._fleet.update(msgspec.convert(beat, ReplicaHeartbeat))


# For a first try: `dragoman serve --ray ADDRESS`.


def serve_on_ray(
    settings: Settings, address: str, replicas: int, on_ready: Callable[[], None], wait: Callable[[], None]
) -> None:
    """Serve with these settings until `wait` returns; the address `local` starts a cluster for it."""
    is_local = address == "local"
    own: dict[str, Any] = {"include_dashboard": False} if is_local else {}
    ray.init(address=address, log_to_driver=is_local, logging_level="warning", **own)
    try:
        where = {"host": settings.host, "port": settings.port}
        serve.start(proxy_location="HeadOnly" if is_local else "EveryNode", http_options=where)
        serve.run(build_application(_arguments(settings, replicas, local=is_local)), name=APPLICATION)
        on_ready()
        wait()
    finally:
        if is_local:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
        ray.shutdown()


def _arguments(settings: Settings, replicas: int, *, local: bool) -> dict[str, Any]:
    mapping = {name: value for name, value in _plain(settings).items() if name not in TAKEN}
    name, model = mapping.pop("model_name", settings.model_name), mapping.pop("model", None)
    mapping.pop("shutdown_grace", None)
    engine = mapping.pop("engine", settings.engine)
    own = {"name": settings.model_name or name, "model": model, "engine": engine, "replicas": replicas}
    fields = {key: value for key, value in own.items() if value is not None}
    # No other application needs the cores: run all requested replicas, however few cores there are.
    shares = {"cpus": 0, "door_cpus": 0} if local else {}
    return {**fields, **shares, "settings": mapping, "local": local, "drain_s": settings.shutdown_grace}
