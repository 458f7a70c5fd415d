"""Locations of stores, shown without their secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from tests.database.conftest import drop_all
from tvm_adaptive import TuneConfig, tune
from tvm_adaptive.database.location import displayed, resolve_url, scrubbed, url_of
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError
from tvm_adaptive.measure_callback import read_journal
from tvm_adaptive.tuning.config import FinishConfig, SearchConfig


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://me:hunter2@127.0.0.1:1/name",
        "postgresql+psycopg://me@127.0.0.1:1/name?password=hunter2",
        "postgresql+psycopg://127.0.0.1:1/name?user=me&password=hunter2&application_name=x",
        "postgresql+psycopg://127.0.0.1:1/name?sslpassword=hunter2",
        "postgresql+psycopg://127.0.0.1:1/name?PassWord=hunter2",
        "postgresql+psycopg://127.0.0.1:1/name?passfile=hunter2",
        "postgresql+psycopg://127.0.0.1:1/name?hunter2_secret=x&client_secret=hunter2",
    ],
)
def test_a_name_holds_no_secret(url: str) -> None:
    name = displayed(url_of(url))
    assert "hunter2" not in name.replace("hunter2_secret", "")
    assert "***" in name
    assert "127.0.0.1:1/name" in name
    with pytest.raises(StoreError) as caught:
        RecordStore(url)
    assert "hunter2" not in str(caught.value).replace("hunter2_secret", "")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@pass:w0rd@host/name",
        "postgresql://me:pass@hunter2@host/name",
        "postgresql://me:12/hunter2@host/name@x",
        "postgresql://host:hunter2/name",
        "postgresql://host/hunter2@x",
    ],
)
def test_what_cannot_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(StoreError, match="%40") as caught:
        url_of(url)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_what_is_no_secret_is_shown() -> None:
    url = "postgresql+psycopg://tuner@/records?host=/run/pg&sslmode=require"
    assert displayed(url_of(url)) == (
        "postgresql+psycopg://tuner@/records?host=%2Frun%2Fpg&sslmode=require"
    )
    assert displayed(url_of("a folder/records.db")) == "a folder/records.db"


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=4))
def test_no_message_of_a_driver_tells_a_password(password: str) -> None:
    url = make_url("postgresql://host/name").set(username="me", password=password)
    text = f"could not connect to {url.render_as_string(hide_password=False)} with {password}"
    assert password not in scrubbed(text, url).replace("***", "")


def test_a_run_writes_no_password(postgres: str, tmp_path: Path) -> None:
    config = TuneConfig(
        search=SearchConfig(n_trials_per_round=4, population_size=64, genetic_num_iters=1),
        finish=FinishConfig(top_k=1, max_task_sec=0.5),
        store=f"{postgres}&password=hunter2",
    )
    try:
        tune("te:GMM", work_dir=tmp_path, trials=4, seed=1, config=config)
    finally:
        drop_all(postgres)
    (run,) = [
        event for event in read_journal(tmp_path / "journal.jsonl") if event["event"] == "run"
    ]
    assert "password=***" in run["config"]["store"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_a_path_below_the_home_directory_needs_no_shell(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("TUNING_STORE", "~/b.db")
    assert resolve_url("~/a.db") == "/home/alice/a.db"
    assert resolve_url("env:TUNING_STORE") == "/home/alice/b.db"
    assert resolve_url("postgresql://~host/a") == "postgresql://~host/a"
