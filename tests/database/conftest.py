from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tvm_adaptive._tvm import (
    IRModule,
    Schedule,
    Target,
    TuningRecord,
    Workload,
    args_info_of,
    te_workload,
)
from tvm_adaptive.database import schema
from tvm_adaptive.database.store import RecordStore
from tvm_adaptive.errors import StoreError


@pytest.fixture(scope="session")
def target() -> Target:
    return Target({"kind": "llvm", "num-cores": 2})


@pytest.fixture(scope="session")
def mods() -> dict[str, IRModule]:
    return {name: te_workload(name) for name in ("GMM", "C1D")}


def make_record(
    mod: IRModule, target: Target, seconds: float | None, seed: int = 1
) -> TuningRecord:
    """Return a record of a schedule whose first loop is split at random."""
    schedule = Schedule(mod, seed=seed)
    block = schedule.get_sblock(_first_block(mod))
    loop = schedule.get_loops(block)[1]
    schedule.split(loop, schedule.sample_perfect_tile(loop, n=4))
    schedule.enter_postproc()
    run_secs = [1e10] if seconds is None else [seconds]
    return TuningRecord(schedule.trace, Workload(mod), run_secs, target, args_info_of(mod))


def _first_block(mod: IRModule) -> str:
    from tvm_adaptive._tvm import anchor_of

    return anchor_of(mod)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Start a server of our own on a socket in a new folder; skip where there is none."""
    initdb = shutil.which("initdb") or next(
        # Where Debian has it, beside others of its versions.
        (str(path) for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")),
        None,
    )
    if initdb is None:
        pytest.skip("PostgreSQL's initdb is not on PATH")
    # Not in pytest's folders, which are its user's alone.
    with tempfile.TemporaryDirectory(prefix="tvm-adaptive-pg-") as name:
        folder = Path(name)
        user = _as_user(folder)
        subprocess.run(
            [*user, initdb, "-D", str(folder / "data"), "-U", "tuner", "--auth=trust"],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        server = subprocess.Popen(
            [
                *user,
                str(Path(initdb).with_name("postgres")),
                *("-D", str(folder / "data"), "-k", str(folder), "-h", "", "-F"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        url = f"postgresql+psycopg://tuner@/postgres?host={folder}"
        try:
            _wait_for(url)
            yield url
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)


def _as_user(folder: Path) -> list[str]:
    """Return what runs a command as nobody: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("PostgreSQL does not run as root, and setpriv is not on PATH")
    shutil.chown(folder, "nobody")
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


def _wait_for(url: str) -> None:
    for _ in range(100):
        try:
            RecordStore(url).close()
        except StoreError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("PostgreSQL did not start")


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "records.db")
        return
    url = request.getfixturevalue("postgres")
    yield url
    drop_all(url)


def drop_all(url: str) -> None:
    """Leave a server as it was before there was a store."""
    engine = sa.create_engine(url)
    schema.metadata.drop_all(engine)
    engine.dispose()
