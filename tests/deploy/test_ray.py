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


def test_every_node_has_the_quick_proxy_and_the_keys() -> None:
    [service] = documents("ray", "rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        [container] = spec["containers"]
        assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"]
        assert container["volumeMounts"][0]["name"] == spec["volumes"][0]["name"]
