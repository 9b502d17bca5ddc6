"""What is in deploy/ is right, as the programs say that read it, or else as our own rules say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman._version import __version__
from dragoman.cli.parser import OTHER_VARIABLES
from dragoman.engines.scripted import ScriptedEngine, say
from dragoman.http.app import App
from dragoman.limits import Limits
from dragoman.settings import Settings, load, options
from tests.deploy.support import DEPLOY, documents, program, run
from tests.http.test_metrics import exposition, read

VARIABLE = re.compile(r"\bDRAGOMAN_[A-Z_]+\b")
METRIC = re.compile(r"\b(?:dragoman|process)_[a-z_]+\b")
MANIFESTS = [
    (path.name, document)
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in documents("kubernetes", path.name)
]


def manifest(kind: str) -> dict[str, Any]:
    [fields] = [each for _, each in MANIFESTS if each["kind"] == kind]
    return fields


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def files() -> list[Path]:
    return [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_variables_are_settings(path: Path) -> None:
    """A name that nobody reads would be a setting that does not hold."""
    known = {option.env for option in options()} | OTHER_VARIABLES
    assert set(VARIABLE.findall(path.read_text())) <= known


@pytest.mark.parametrize(
    "path", ["grafana/dragoman.json", "prometheus/alerts.yml", "kubernetes/autoscaling.yaml"]
)
def test_every_figure_that_is_asked_for_is_there(path: str) -> None:
    there = {name for name, _ in read(exposition())} | {"dragoman_refused_total"}
    asked = set(METRIC.findall((DEPLOY / path).read_text()))
    assert asked
    assert asked <= there


def test_labels_that_alerts_and_panels_look_at_are_there() -> None:
    text = (DEPLOY / "grafana/dragoman.json").read_text() + (DEPLOY / "prometheus/alerts.yml").read_text()
    labels = {name for _, pairs in read(exposition()) for name, _ in pairs}
    asked = {name for result in re.findall(r"\bby \(([^)]*)\)", text) for name in result.split(", ")}
    assert asked - {"instance"} <= labels


# Dockerfile and compose


def test_the_image_is_small_and_runs_as_nobody() -> None:
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line and line[0] not in "# "]
    names = [name for name, _ in steps]
    stages = [rest for name, rest in steps if name == "FROM"]
    assert len(stages) == 2
    assert all("slim" in stage for stage in stages)
    last = steps[len(names) - names[::-1].index("FROM") :]
    fields = dict(last)
    assert fields["USER"].isdigit() and int(fields["USER"]) > 0
    # As a list, so that the server is the process that signals reach.
    assert json.loads(fields["ENTRYPOINT"]) == ["dragoman", "serve"]
    assert "/health" in fields["HEALTHCHECK"]
    assert set(json.loads(fields["VOLUME"])) == {"/cache", "/data"}
    assert "ADD" not in names
    assert all(
        "rm -rf /var/lib/apt/lists" in rest for name, rest in steps if name == "RUN" and "apt-get" in rest
    )
    # What is copied is there, and let in.
    let_in = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = [rest.split()[:-1] for name, rest in steps if name == "COPY" and "--from" not in rest]
    assert {name for names in copied for name in names} == let_in
    assert all((DEPLOY.parent / name).exists() for name in let_in)


def test_the_environment_of_the_image_is_one_that_settings_take() -> None:
    matches = re.findall(r"(DRAGOMAN_\w+)=(\S+)", (DEPLOY / "Dockerfile").read_text())
    settings = load(environ={name: value for name, value in matches if value != "..."})
    assert (settings.host, settings.port, settings.log_json) == ("0.0.0.0", 8000, True)


def test_compose_names_what_it_uses() -> None:
    [compose] = documents("compose.yaml")
    services = compose["services"]
    for service in services.values():
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
        # Nobody but this machine.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    dragoman = services["dragoman"]
    grace = int(dragoman["environment"]["DRAGOMAN_SHUTDOWN_GRACE"])
    assert seconds(dragoman["stop_grace_period"]) > grace + 10
    assert (DEPLOY.parent / dragoman["build"]["dockerfile"]).exists()


def test_compose_keeps_no_secret_in_the_repository() -> None:
    [compose] = documents("compose.yaml")
    ignored = (DEPLOY.parent / ".gitignore").read_text()
    assert all(f"deploy/{Path(each['file']).name}" in ignored for each in compose["secrets"].values())


def test_grafana_finds_its_dashboard_and_its_source() -> None:
    [compose] = documents("compose.yaml")
    [source] = documents("grafana", "provisioning", "datasources", "prometheus.yaml")
    [provider] = documents("grafana", "provisioning", "dashboards", "dragoman.yaml")
    dashboard = json.loads((DEPLOY / "grafana/dragoman.json").read_text())
    uids = {
        target["datasource"]["uid"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    }
    assert uids == {source["datasources"][0]["uid"]}
    folder = provider["providers"][0]["options"]["path"]
    assert any(folder in volume for volume in compose["services"]["grafana"]["volumes"])
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(numbers) == len(set(numbers))


# What has a program that checks it


def test_prometheus_takes_its_files() -> None:
    promtool = program("promtool", "prometheus")
    run(promtool, "check", "config", DEPLOY / "prometheus/prometheus.yml")
    run(promtool, "check", "rules", DEPLOY / "prometheus/alerts.yml")


def test_prometheus_takes_what_the_panels_ask(tmp_path: Path) -> None:
    """As rules: there is no other way to have expressions checked without a server."""
    promtool = program("promtool", "prometheus")
    dashboard = json.loads((DEPLOY / "grafana/dragoman.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "1m")}
        for number, expr in enumerate(asked)
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    run(promtool, "check", "rules", tmp_path / "rules.yml")


def test_systemd_takes_its_unit_and_finds_it_closed(tmp_path: Path) -> None:
    analyze = program("systemd-analyze", "systemd")
    unit = tmp_path / "dragoman.service"
    text = (DEPLOY / "dragoman.service").read_text()
    unit.write_text(text.replace("/opt/dragoman/bin/dragoman serve", "/bin/true"))
    assert run(analyze, "verify", unit) == ""
    # Of 100, which is a service without any of it.
    run(analyze, "security", "--offline=true", "--threshold=20", unit)
    grace = int(re.findall(r"DRAGOMAN_SHUTDOWN_GRACE=(\d+)", text)[0])
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > grace + 10


def test_caddy_takes_its_file() -> None:
    caddy = program("caddy", "caddy")
    file = DEPLOY / "Caddyfile"
    run(caddy, "validate", "--config", file, "--adapter", "caddyfile")
    run(caddy, "fmt", "--diff", file)


def test_kustomize_takes_the_manifests() -> None:
    kubectl = program("kubectl", "kubernetes-client")
    assert run(kubectl, "kustomize", DEPLOY / "kubernetes").count("\nkind: ") == len(MANIFESTS) - 1


# Kubernetes, by our own rules: nobody here has its schemas.


def test_manifests_are_listed_and_have_their_versions() -> None:
    versions = {
        "Namespace": "v1",
        "Secret": "v1",
        "Service": "v1",
        "PersistentVolumeClaim": "v1",
        "Deployment": "apps/v1",
        "PodDisruptionBudget": "policy/v1",
        "HorizontalPodAutoscaler": "autoscaling/v2",
        "NetworkPolicy": "networking.k8s.io/v1",
    }
    listed = manifest("Kustomization")["resources"]
    assert sorted(listed) == sorted({name for name, _ in MANIFESTS} - {"kustomization.yaml"})
    items = {(each["kind"], each["apiVersion"]) for _, each in MANIFESTS if each["kind"] != "Kustomization"}
    assert items == set(versions.items())


def test_selectors_choose_the_pods_there_are() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    for kind, path in (
        ("Deployment", ("selector", "matchLabels")),
        ("Service", ("selector",)),
        ("PodDisruptionBudget", ("selector", "matchLabels")),
        ("NetworkPolicy", ("podSelector", "matchLabels")),
    ):
        chosen: Any = manifest(kind)["spec"]
        for name in path:
            chosen = chosen[name]
        assert chosen.items() <= labels.items()
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["name"] == manifest("Deployment")["metadata"]["name"]


def pod() -> tuple[dict[str, Any], dict[str, Any]]:
    spec = manifest("Deployment")["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def test_a_pod_that_goes_has_time_to_let_its_answers_end() -> None:
    spec, container = pod()
    env = {each["name"]: each.get("value") for each in container["env"]}
    slept = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = int(env["DRAGOMAN_SHUTDOWN_GRACE"])
    assert spec["terminationGracePeriodSeconds"] >= slept + grace + 10 + 30
    ready = container["readinessProbe"]
    # It is out of the service before it is told to stop.
    assert slept >= ready["periodSeconds"] * ready["failureThreshold"]


def test_probes_ask_routes_that_are_open_without_a_key() -> None:
    _, container = pod()
    app = App(ScriptedEngine(say("hi")), Settings(store="memory"))
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert set(paths.values()) <= app._open
    ports = {port["name"] for port in container["ports"]}
    assert {container[probe]["httpGet"]["port"] for probe in paths} == ports


def test_a_pod_has_the_volumes_and_secrets_that_it_mounts() -> None:
    spec, container = pod()
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    claims = {each["metadata"]["name"] for _, each in MANIFESTS if each["kind"] == "PersistentVolumeClaim"}
    used = {
        each["persistentVolumeClaim"]["claimName"]
        for each in spec["volumes"]
        if "persistentVolumeClaim" in each
    }
    assert used == claims
    keys = manifest("Secret")["stringData"].keys()
    references = [
        each["valueFrom"]["secretKeyRef"]
        for each in container["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    ]
    assert {each["key"] for each in references} <= keys
    assert container["image"] == f"dragoman:{__version__}"


def test_a_pod_may_do_nothing_but_serve() -> None:
    spec, container = pod()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False


def test_proxies_let_files_through_that_the_server_takes() -> None:
    most = Limits().file_bytes
    nginx = int(re.findall(r"client_max_body_size (\d+)m;", (DEPLOY / "nginx.conf").read_text())[0]) * 1024**2
    caddy = int(re.findall(r"max_size (\d+)MB", (DEPLOY / "Caddyfile").read_text())[0]) * 1000**2
    assert min(nginx, caddy) > most
