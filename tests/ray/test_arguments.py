"""What `dragoman.ray:build` is told, as texts of a command line or values of a YAML. No Ray in it."""

import subprocess
import sys
from typing import Any

import pytest

from dragoman.errors import SettingsError
from dragoman.ray.arguments import read_arguments, settings_of

OPEN = {"insecure": True}


def test_one_model_is_told_directly() -> None:
    read = read_arguments({"model": "a.gguf", "replicas": "2", "settings": OPEN, "cpus": "0.5"})
    (model,) = read.models
    assert (model.model, model.replicas, model.cpus, model.engine) == ("a.gguf", 2, 0.5, "local")
    settings = settings_of(read, model)
    assert (settings.model, settings.insecure, settings.store) == ("a.gguf", True, "none")
    assert settings.shutdown_grace == read.drain_s


def test_a_command_line_says_settings_in_json() -> None:
    read = read_arguments({"model": "a.gguf", "settings": '{"insecure": true, "context": 512}'})
    assert settings_of(read, read.models[0]).context == 512


def test_several_models_have_settings_of_their_own() -> None:
    read = read_arguments(
        {
            "settings": {**OPEN, "store": "postgresql://db/x", "context": 1024},
            "models": [
                {"name": "a", "model": "a.gguf"},
                {
                    "name": "b",
                    "engine": "vllm",
                    "settings": {"context": 2048, "engine_args": {"tensor_parallel_size": 2}},
                    "placement_bundles": [{"CPU": 1, "GPU": 1}, {"GPU": 1}],
                    "placement_strategy": "STRICT_PACK",
                    "autoscaling": {"min": 1, "max": 4, "target": 16},
                },
            ],
        }
    )
    first, second = (settings_of(read, model) for model in read.models)
    assert (first.context, second.context, second.engine) == (1024, 2048, "vllm")
    assert (first.model_name, second.model_name) == ("a", "b")
    assert second.engine_args == {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replicas": "no"}, "`replicas`"),
        ({"replicas": 0}, "`replicas`"),
        ({"repicas": 2}, "repicas"),
        ({"autoscaling": {"min": 3, "max": 2}}, "`max` is 2"),
        ({"settings": {**OPEN, "contxt": 1}}, "contxt"),
        ({"settings": {**OPEN, "port": 1}}, "`port`"),
        ({"settings": {}}, "there is no key"),
        ({"settings": '{"insecure": yes}'}, "`settings` is not valid JSON"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "its own `name`"),
        ({"models": [{"name": "a"}, {"name": "b"}], "door": False}, "need the ingress"),
        ({"models": [{"name": "a"}], "model": "b"}, "move `model` into one"),
        ({"replicas": 2, "settings": {**OPEN, "store": "sqlite"}}, "PostgreSQL"),
        ({"gpus": 1, "placement_bundles": [{"GPU": 1}]}, "first bundle"),
    ],
)
def test_what_is_wrong_is_said_by_its_name(args: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_arguments({"settings": OPEN, **args})
    assert said in raised.value.message


def test_nothing_of_ray_is_imported_for_the_rest() -> None:
    asked = "import sys, dragoman.ray, dragoman.ray.ingress, dragoman.cli.serve; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "False\n"
