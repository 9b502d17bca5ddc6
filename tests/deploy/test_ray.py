"""The manifest for KubeRay says what `dragoman.ray:build` takes."""

from pathlib import Path

import yaml

from dragoman.ray.arguments import read_arguments, settings_of
from tests.deploy.support import documents


def test_the_arguments_of_the_manifest_are_taken(tmp_path: Path) -> None:
    [service] = documents("ray", "rayservice.yaml")
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "dragoman.ray:build"
    args = application["args"]
    assert args["settings"]["api_key_file"].startswith("/etc/dragoman/")
    (tmp_path / "keys").write_text("sk-0123456789-0123456789-0123\n")
    args["settings"]["api_key_file"] = str(tmp_path / "keys")
    fleet = read_arguments(args)
    assert [model.name for model in fleet.models] == ["small", "large"]
    assert settings_of(fleet, fleet.models[1]).engine_args["tensor_parallel_size"] == 2


SERVICE = {
    *("serveConfigV2", "rayClusterConfig", "serveService", "upgradeStrategy", "excludeHeadPodFromServeSvc"),
    *("rayClusterDeletionDelaySeconds", "suspend"),
}
CLUSTER = {
    *("headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions"),
    *("gcsFaultToleranceOptions", "headServiceAnnotations", "suspend", "managedBy", "authOptions"),
}
HEAD = {"template", "headService", "enableIngress", "rayStartParams", "serviceType", "resources", "labels"}
WORKERS = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "idleTimeoutSeconds", "rayStartParams"),
    *("template", "scaleStrategy", "numOfHosts", "resources", "labels", "suspend"),
}
"""The fields that KubeRay's ray.io/v1 has."""


def test_every_field_is_one_of_kuberays() -> None:
    [service] = documents("ray", "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert service["spec"].keys() <= SERVICE
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster.keys() <= CLUSTER and cluster["headGroupSpec"].keys() <= HEAD
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= WORKERS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    ports = {port["name"] for port in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]}
    # By these names the operator finds what it makes services of.
    assert {"gcs", "dashboard", "serve"} <= ports


def test_what_is_asked_for_first_fits_onto_the_workers() -> None:
    [service] = documents("ray", "rayservice.yaml")
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    args = application["args"]
    args["settings"] = {"insecure": True}
    fleet = read_arguments(args)
    needed = {"cpu": fleet.doors * fleet.door_cpus, "nvidia.com/gpu": 0.0}
    for model in fleet.models:
        count = model.autoscaling.min if model.autoscaling else model.replicas
        bundles = model.placement_bundles or [{"CPU": model.cpus, "GPU": model.gpus}]
        for bundle in bundles:
            needed["cpu"] += count * bundle.get("CPU", 0)
            needed["nvidia.com/gpu"] += count * bundle.get("GPU", 0)
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    for name, amount in needed.items():
        assert amount <= float(limits[name]) * group["replicas"], name


def test_every_node_has_the_quick_proxy_and_the_keys() -> None:
    [service] = documents("ray", "rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        [container] = spec["containers"]
        assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"]
        assert container["volumeMounts"][0]["name"] == spec["volumes"][0]["name"]
