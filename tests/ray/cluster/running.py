"""A small cluster of Ray: two nodes on one machine, and an application of dragoman on it.

Ray reads its variables when it is imported, so they are set first, and Ray is imported here only.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent.parent
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without it workers are as nice as they can be, and wait for whatever else the machine does.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    # Nobody is in front of the proxy here who would have to be told first.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
}
MEMORY = 80 * 1024 * 1024
"""Of the object store, which nothing here uses."""
PORT = 8765


@contextmanager
def cluster() -> Iterator[None]:
    """Two nodes with Serve on them. Whatever happens inside, nothing of it stays."""
    os.environ.update(VARIABLES)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    result = Cluster(initialize_head=True, head_node_args=node)
    try:
        result.add_node(num_cpus=1, object_store_memory=MEMORY)
        ray.init(result.address, logging_level="warning", log_to_driver="RAY_LOGS" in os.environ)
        where = {"host": "127.0.0.1", "port": PORT}
        serve.start(proxy_location="HeadOnly", http_options=where)
        yield
    finally:
        if ray.is_initialized():
            # Nobody is drained: the processes are ended.
            ray.shutdown()
        result.shutdown()


def deploy(args: dict[str, Any]) -> None:
    from ray import serve

    from dragoman.ray import build

    serve.run(build({"door_cpus": 0.01, "drain_s": 10, "beat_s": 0.5, **args}), name="dragoman")


def client() -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60)
