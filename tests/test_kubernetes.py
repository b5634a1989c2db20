"""The example manifests are what Kubernetes accepts, and call `jaxengine` with options that exist."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxengine.commands.cli import build_parser
from jaxengine.engine.metrics import HELP
from jaxengine.server.http.request.auth import OPEN_PATHS

FOLDER = Path(__file__).parents[1] / "docs" / "kubernetes"
KUBERNETES = "1.30"
# The part of the LeaderWorkerSet API (leaderworkerset.x-k8s.io/v1) around the pod templates.
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": {"type": "object", "required": ["spec"]},
                        "workerTemplate": {"type": "object", "required": ["spec"]},
                    },
                },
            },
        },
    },
}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(required: str, **properties) -> dict:
    """The schema of an object with these properties alone. required: their names, set apart by blanks."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def custom(api: str, spec: dict) -> dict:
    return closed("apiVersion kind metadata spec", apiVersion={"const": api}, kind={}, metadata={}, spec=spec)


DURATION = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h|d)$"}
RULE = closed("alert expr", alert={"type": "string"}, expr={"type": "string"}, labels=TEXTS, annotations=TEXTS,
              **{"for": DURATION})  # fmt: skip
# The parts of other APIs that the manifests use: the Prometheus operator's and KEDA's.
CUSTOM = {
    "PodMonitor": custom(
        "monitoring.coreos.com/v1",
        closed(
            "selector podMetricsEndpoints",
            selector=closed("", matchLabels=TEXTS, matchExpressions={"type": "array"}),
            podMetricsEndpoints={
                "type": "array",
                "items": closed(
                    "port",
                    port={"type": "string"},
                    path={"type": "string"},
                    interval=DURATION,
                    authorization=closed("credentials", type={}, credentials=closed("name key", name={}, key={})),
                ),
            },
        ),
    ),
    "PrometheusRule": custom(
        "monitoring.coreos.com/v1",
        closed("groups", groups={"items": closed("name rules", name={}, rules={"type": "array", "items": RULE})}),
    ),
    "ScaledObject": custom(
        "keda.sh/v1alpha1",
        closed(
            "scaleTargetRef triggers",
            scaleTargetRef=closed("name", apiVersion={}, kind={}, name={}),
            **dict.fromkeys(
                ("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod"), {"type": "integer"}
            ),
            triggers={
                "items": closed(
                    "type metadata",
                    type={"const": "prometheus"},
                    metricType={"enum": ["AverageValue", "Value"]},
                    metadata={**TEXTS, "required": ["serverAddress", "query", "threshold"]},
                )
            },
        ),
    ),
}
CUSTOM |= {
    "InferencePool": custom(
        "inference.networking.k8s.io/v1",
        closed(
            "selector targetPorts endpointPickerRef",
            selector=closed("matchLabels", matchLabels=TEXTS),
            targetPorts={"items": closed("number", number={"type": "integer"}), "minItems": 1},
            endpointPickerRef=closed(
                "name port",
                name={"type": "string"},
                port=closed("number", number={"type": "integer"}),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "HTTPRoute": custom(
        "gateway.networking.k8s.io/v1",
        closed(
            "parentRefs rules",
            parentRefs={"items": closed("name", name={"type": "string"})},
            rules={
                "items": closed(
                    "backendRefs",
                    matches={"items": closed("path", path=closed("type value", type={}, value={"pattern": "^/"}))},
                    backendRefs={"items": closed("group kind name", group={}, kind={}, name={})},
                    timeouts=closed("", request={"type": "string"}),
                )
            },
        ),
    ),
}
PROMETHEUS = "prometheus-operator/prometheus-operator/v0.93.0/example/prometheus-operator-crd/monitoring.coreos.com"
# The operators' own definitions of these objects, by the names of their files, with the releases that were read last.
CRDS = {
    "lws": "kubernetes-sigs/lws/v0.10.0/config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    "keda": "kedacore/keda/v2.20.2/config/crd/bases/keda.sh_scaledobjects.yaml",
    "pods": f"{PROMETHEUS}_podmonitors.yaml",
    "rules": f"{PROMETHEUS}_prometheusrules.yaml",
    "pools": "kubernetes-sigs/gateway-api-inference-extension/v1.6.0/config/crd/bases/"
    "inference.networking.k8s.io_inferencepools.yaml",
    "routes": "kubernetes-sigs/gateway-api/v1.6.1/config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",
}
# What LeaderWorkerSet sets in each pod.
POD_VARIABLES = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.example"}


@pytest.fixture(scope="module")
def objects() -> dict:
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "jaxengine.yaml").read_text())}


def pod_templates(objects) -> list[dict]:
    template = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def test_kubernetes_takes_the_objects(objects):
    jsonschema.validate(objects["LeaderWorkerSet"], LEADER_WORKER_SET)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **each["metadata"]}, "spec": each["spec"]}
        for each in pod_templates(objects)
    ]
    for each in (objects["Service"], objects["PersistentVolumeClaim"], objects["HorizontalPodAutoscaler"], *pods):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_the_parts_name_each_other(objects):
    leader, _ = pod_templates(objects)
    assert objects["Service"]["spec"]["selector"].items() <= leader["metadata"]["labels"].items()
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    found = objects["LeaderWorkerSet"]
    assert target == {"apiVersion": found["apiVersion"], "kind": found["kind"], "name": found["metadata"]["name"]}
    rule = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"][0]
    metric = objects["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert rule["name"]["as"] == metric
    assert re.match(rule["name"]["matches"], "vllm:num_requests_waiting")


def test_the_commands_have_options_that_exist(objects):
    for template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            words = [*container["command"], *container["args"]]
            for name, value in POD_VARIABLES.items():
                words = [word.replace(f"$({name})", value) for word in words]
            assert words[0] == "jaxengine" and not any("$(" in word for word in words)
            build_parser().parse_args(words[1:])


def test_a_restarted_engine_does_not_cost_the_pod(objects):
    leader, _ = pod_templates(objects)
    (engine,) = leader["spec"]["containers"]
    paths = {kind: engine[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    assert set(paths.values()) <= OPEN_PATHS  # probes have no key
    ports = {port["name"] for port in engine["ports"]}
    assert all(engine[f"{kind}Probe"]["httpGet"]["port"] in ports for kind in paths)


def test_the_manifests_of_one_host_fit_each_other(objects):
    """Kubernetes and the operators take them, and what they ask of metrics there is."""
    found = {
        each["kind"]: each
        for name in ("one-host", "keda", "monitoring", "gateway")
        for each in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    }
    for kind, each in found.items():
        if kind in CUSTOM:
            jsonschema.validate(each, CUSTOM[kind])
        else:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
    spec = found["Deployment"]["spec"]
    labels, (engine,) = spec["template"]["metadata"]["labels"], spec["template"]["spec"]["containers"]
    build_parser().parse_args([*engine["command"], *engine["args"]][1:])
    assert {engine[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} <= OPEN_PATHS
    volumes = {each["name"] for each in spec["template"]["spec"]["volumes"]}
    assert {each["name"] for each in engine["volumeMounts"]} == volumes
    for selector in (spec["selector"], found["PodDisruptionBudget"]["spec"]["selector"]):
        assert selector["matchLabels"] == labels == found["Service"]["spec"]["selector"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": found["Deployment"]["metadata"]["name"]}
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        assert found[kind]["spec"]["scaleTargetRef"] == target
    (expression,) = found["PodMonitor"]["spec"]["selector"]["matchExpressions"]
    leader, _ = pod_templates(objects)
    assert {labels["app"], leader["metadata"]["labels"]["app"]} == set(expression["values"])
    (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in engine["ports"]}
    # The pool's pods are the Deployment's, at its port, and serve the pickers' metrics at another without a key.
    pool, (backend,) = found["InferencePool"], found["HTTPRoute"]["spec"]["rules"][0]["backendRefs"]
    group = pool["apiVersion"].split("/")[0]
    assert backend == {"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}
    assert pool["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    assert f"--port={ports['http']}" in engine["args"] and f"--metrics-port={ports['metrics']}" in engine["args"]
    assert f"--model-server-metrics-port={ports['metrics']}" in (FOLDER / "gateway.yaml").read_text()
    rules = [rule for group in found["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
    queries = [rule["expr"] for rule in rules] + [found["ScaledObject"]["spec"]["triggers"][0]["metadata"]["query"]]
    for query in queries:
        asked = re.findall(r"\b(?:vllm:|jaxengine:|http_)\w+", query)
        assert asked and {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked} <= HELP.keys(), query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    assert len({rule["alert"] for rule in rules}) == len(rules) and all(rule["annotations"] for rule in rules)


def strict(schema: Any) -> Any:
    """A definition's schema in which an object has the properties that it lists and no others."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if key != "description"}
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if "properties" in schema and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.thorough("downloads the operators' definitions; the schemas above are the parts of them that we use")
def test_the_operators_definitions_take_the_objects():
    schemas = {}
    for name, path in CRDS.items():
        kept = Path(__file__).parents[1] / ".cache" / "crds" / f"{name}.yaml"
        if not kept.exists():
            try:
                text = urllib.request.urlopen(f"https://raw.githubusercontent.com/{path}", timeout=30).read()
            except OSError as error:
                pytest.skip(f"GitHub cannot be reached: {error}")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(text)
        about = yaml.load(kept.read_text(), yaml.CSafeLoader)["spec"]
        for version in about["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            schemas[f"{about['group']}/{version['name']}", about["names"]["kind"]] = schema
    checked = set()
    for path in FOLDER.glob("*.yaml"):
        for each in yaml.safe_load_all(path.read_text()):
            if (key := (each.get("apiVersion"), each.get("kind"))) in schemas:
                jsonschema.Draft7Validator(schemas[key]).validate(each)
                checked.add(key[1])
    assert checked == {*CUSTOM, "LeaderWorkerSet"}


def test_compiled_steps_outlive_the_pods(objects):
    """They lie on a volume that is no pod's own, that all pods may write, and that no group may."""
    leader, worker = pod_templates(objects)
    (given,) = (word for word in leader["spec"]["containers"][0]["args"] if word.startswith("--compile-cache-dir="))
    folder = PurePosixPath(given.partition("=")[2])
    claim = objects["PersistentVolumeClaim"]
    for template in (leader, worker):
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        (name,) = (
            each["name"] for each in mounts if folder.is_relative_to(each["mountPath"]) and "readOnly" not in each
        )
        (volume,) = (each for each in template["spec"]["volumes"] if each["name"] == name)
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
        assert "fsGroup" not in template["spec"]["securityContext"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
