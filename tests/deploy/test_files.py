"""Dockerfile and Compose files, read as text: what must hold wherever they are used."""

import re
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from gateway.settings import GatewaySettings
from protos.settings_files import FOLDERS_VARIABLE
from quire.prepare import PrepareSettings
from scheduler_svc.settings import SchedulerSettings
from tests.deploy.engine import ROOT, SERVICES
from worker_svc.loader.resolve import BUNDLED_REQUIREMENT
from worker_svc.settings import WorkerSettings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.gpu.yml").read_text())
SECRETS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.secrets.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SETTINGS: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
    "prepare": PrepareSettings,
}
# Settings that the file itself gives: addresses within the cell, what `prepare` leaves in files, and where it does.
GIVEN_BY_THE_FILE = {
    "gateway": {"host", "port", "scheduler", "model", "served_model_name", "cluster_token"},
    "scheduler": {"host", "scheduler_port", "cluster_token"},
    "worker": {"host", "worker_port", "worker_address", "scheduler", "model", "cluster_token"},
    "prepare": {"settings_folder", "redis_folder", "redis_server"},
}
# Given by the file for something else than the setting of that name.
NO_SETTINGS = {FOLDERS_VARIABLE}


def test_only_the_gateway_publishes_a_port() -> None:
    assert [name for name, service in COMPOSE["services"].items() if service.get("ports")] == ["gateway"]


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_watched_restarted_and_held_in(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_variable_is_a_setting_of_its_service(name: str) -> None:
    variables = COMPOSE["services"][name]["environment"] | GPU["services"].get(name, {}).get("environment", {})
    ours = {variable for variable in variables if variable.startswith("QUIRE_")} - NO_SETTINGS
    assert {variable.removeprefix("QUIRE_").lower() for variable in ours} <= SETTINGS[name].model_fields.keys()


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_other_setting_is_handed_on_from_the_shell(name: str) -> None:
    environment = COMPOSE["services"][name]["environment"]
    handed_on = {
        variable.removeprefix("QUIRE_").lower()
        for variable, value in environment.items()
        if value is None or str(value).startswith(f"${{{variable}:-")
    }
    assert SETTINGS[name].model_fields.keys() - handed_on == GIVEN_BY_THE_FILE[name]


@pytest.mark.parametrize("name", ["gateway", "scheduler"])
def test_container_is_not_killed_before_its_drain_has_ended(name: str) -> None:
    service = COMPOSE["services"][name]
    drain_seconds = service["environment"][f"QUIRE_{name.upper()}_DRAIN_SECONDS"]
    assert service["stop_grace_period"] == f"{drain_seconds}s10000ms"


@pytest.mark.parametrize("setting", ["model", "dtype", "max_model_len", "block_size"])
def test_scheduler_is_made_anew_when_its_workers_bring_another_model(setting: str) -> None:
    assert setting in WorkerSettings.model_fields
    label = COMPOSE["services"]["scheduler"]["labels"][f"quire.{setting.replace('_', '-')}"]
    assert label.startswith(f"${{QUIRE_{setting.upper()}:-")


def test_cell_has_the_same_name_in_every_container() -> None:
    assert COMPOSE["services"]["scheduler"]["environment"]["QUIRE_CELL_NAME"] == "${QUIRE_CELL_NAME:-quire}"


def test_secrets_are_no_variables_of_the_services() -> None:
    for name in SERVICES:
        assert "QUIRE_CLUSTER_TOKEN" not in COMPOSE["services"][name].get("environment", {})


def test_redis_is_reached_by_the_scheduler_alone() -> None:
    on_index = {name for name, service in COMPOSE["services"].items() if "index" in service["networks"]}
    assert on_index == {"scheduler", "redis"}
    assert COMPOSE["networks"]["index"]["internal"]


def test_last_stages_run_as_a_user_and_take_nothing_from_pip() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)[1:]
    last = {stage.split()[2]: stage for stage in stages if stage.split()[2] in ("gateway", "scheduler", "worker")}
    runtime = next(stage for stage in stages if stage.split()[2] == "runtime")
    assert re.search(r"^USER \d", runtime, re.M)
    for stage in last.values():
        assert stage.startswith("runtime ")
        assert not re.search(r"^(RUN|USER)", stage, re.M)


def test_dockerfile_builds_without_extensions_of_its_language() -> None:
    """Some engines in use know neither here-documents nor COPY --link, and cannot fetch another front end."""
    assert "<<" not in DOCKERFILE
    assert "--link" not in DOCKERFILE
    assert "# syntax" not in DOCKERFILE


def test_bundled_model_is_the_one_that_the_loader_knows() -> None:
    assert BUNDLED_REQUIREMENT in DOCKERFILE
    assert BUNDLED_REQUIREMENT in (ROOT / "Makefile").read_text()


def test_gpu_overlay_changes_what_computes_and_nothing_else() -> None:
    assert GPU["services"].keys() == {"prepare", "worker"}
    assert GPU["services"]["prepare"]["image"] == GPU["services"]["worker"]["image"]
    (device,) = GPU["services"]["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_secrets_overlay_gives_the_token_to_every_service_that_takes_one() -> None:
    takes_one = {name for name in SERVICES if name in SETTINGS and "cluster_token" in SETTINGS[name].model_fields}
    assert takes_one == {"gateway", "scheduler", "worker"}
    assert SECRETS["services"] == {name: {"secrets": ["quire_cluster_token"]} for name in takes_one}
    assert SECRETS["secrets"].keys() == {"quire_cluster_token"}
