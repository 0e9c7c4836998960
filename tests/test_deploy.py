"""The files of configs/deploy: their commands are those of the program, and their parts fit together.

Their own tools (hadolint, check-jsonschema, kubernetes-validate, shellcheck) are not run here; docs/service.md has the commands.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml

from tests.support.paths import ROOT
from tuner.cli.main import main

DEPLOY = ROOT / "configs" / "deploy"


def _compose(name: str = "compose") -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / f"{name}.yaml").read_text(encoding="utf-8"))


def _kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))


def _slurm_command() -> list[str]:
    text = (DEPLOY / "worker.sbatch").read_text(encoding="utf-8")
    (line,) = re.findall(r"^sdtune (.+) &$", text, re.MULTILINE)
    return shlex.split(line)


def _commands() -> Iterator[tuple[str, list[str]]]:
    for name, service in _compose()["services"].items():
        if service["image"] == "sdtune" and "entrypoint" not in service:
            yield f"compose {name}", service["command"]
    for document in _kubernetes():
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            yield document["metadata"]["name"], container["args"]
    yield "serve", _compose("serve")["services"]["server"]["command"]
    yield "slurm", _slurm_command()


@pytest.mark.parametrize("command", [pytest.param(given, id=name) for name, given in _commands()])
def test_commands_have_the_options_of_the_program(command: list[str]) -> None:
    name, *arguments = command
    assert name in ("serve", "service", "worker")
    command_of = main.get_command(click.Context(main), name)
    assert command_of is not None
    context = command_of.make_context(name, list(arguments))
    assert ({"profile"} if name == "serve" else {"database", "folder"}) <= context.params.keys()
    assert "database" not in " ".join(arguments), "it may hold a password, which others could read in the command line"


def test_addresses_with_passwords_are_in_the_environment() -> None:
    deployed = [each["spec"]["template"]["spec"] for each in _kubernetes() if each["kind"] == "Deployment"]
    for pod in deployed:
        (container,) = pod["containers"]
        named = {each["name"]: each for each in container["env"]}
        assert "secretKeyRef" in named["SDTUNE_DATABASE"]["valueFrom"]
    services = _compose()["services"]
    assert all("SDTUNE_DATABASE" in services[name]["environment"] for name in ("service", "worker"))


def test_containers_gain_no_privileges_and_write_to_volumes_only() -> None:
    documents = _kubernetes()
    policies = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    assert {"app": "sdtune"} in [each["podSelector"]["matchLabels"] for each in policies]
    for document in documents:
        if document["kind"] == "Deployment":
            (container,) = document["spec"]["template"]["spec"]["containers"]
            allowed = container["securityContext"]
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["readOnlyRootFilesystem"] is True
            assert {"/tmp", "/home/sdtune", "/searches"} <= {each["mountPath"] for each in container["volumeMounts"]}


def test_commands_are_one_service_and_its_workers() -> None:
    names = [command[0] for _, command in _commands()]
    assert (names.count("service"), names.count("worker")) == (2, 4)


def test_compose_mounts_named_volumes_and_depends_on_services_that_say_when_they_are_ready() -> None:
    document, serving = _compose(), _compose("serve")
    services = document["services"] | serving["services"]
    for service in services.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in document["volumes"] or source.startswith("${")
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert "healthcheck" in services[other]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published), "nothing is open to other machines"


def test_kubernetes_volumes_labels_and_ports_fit_together() -> None:
    documents = _kubernetes()
    claims = {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    labels = []
    for document in documents:
        if document["kind"] == "Deployment":
            template = document["spec"]["template"]
            assert document["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
            labels.append(template["metadata"]["labels"])
            pod = template["spec"]
            lasting = [each for each in pod["volumes"] if "emptyDir" not in each]
            assert {each["persistentVolumeClaim"]["claimName"] for each in lasting} <= claims
            mounted = {each["name"] for each in pod["containers"][0]["volumeMounts"]}
            assert mounted == {each["name"] for each in pod["volumes"]}
    (service,) = (each for each in documents if each["kind"] == "Service")
    assert service["spec"]["selector"] in labels


def test_the_script_for_slurm_is_bash_and_the_image_copies_and_installs_what_is_there() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "worker.sbatch")], check=True)
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in line.split()[:-1]), line
    (extras,) = re.findall(r"'\.\[(.+)\]'", text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
