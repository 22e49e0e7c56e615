"""Threads follow the cores that the process may use: of the machine, and of its container."""

import os
from pathlib import Path

import pytest

from worker_svc.threads import prepare_environment, usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", CORES), ("50000 100000", 1), ("199999 100000", 1), (f"{1000 * CORES}00000 100000", CORES)],
)
def test_share_of_a_container_limits_threads(tmp_path: Path, limit: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert usable_cores(tmp_path) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", CORES), ("100000", 1)])
def test_older_control_groups_are_understood(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == expected


def test_without_control_groups_all_cores_are_usable(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES


def test_what_the_user_says_of_openmp_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    prepare_environment(3)
    assert os.environ.pop("OMP_NUM_THREADS") == "3"
    assert 0 < int(os.environ.pop("GOMP_SPINCOUNT")) < 10000
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    prepare_environment(3)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert "GOMP_SPINCOUNT" not in os.environ
