"""Searches replayed on a recorded pool."""

from __future__ import annotations

import numpy as np

from benchmarks.micro.cost_model import Pool
from benchmarks.micro.replayed_search import BATCH, TRIALS, cells, main, replay


def a_pool(n=200):
    rng = np.random.default_rng(3)
    blocks = [np.zeros((1, 4), np.float32) for _ in range(n)]
    return Pool("p", blocks, rng.uniform(1.0, 9.0, n), {})


def test_a_model_that_knows_all_finds_the_best_at_once():
    pool = a_pool()

    def knowing(pool, rows, measured, left, seed):
        assert len(measured) % BATCH == 0
        assert not set(measured) & set(left)
        return -pool.seconds[left]

    def hating(*args):
        return -knowing(*args)

    rows = np.zeros((200, 1))
    assert replay(pool, rows, knowing, seed=0) == [1.0] * len(TRIALS)
    worst = replay(pool, rows, hating, seed=0)
    assert worst[0] == worst[-1] > 1.0, "only the random start is fast"


def test_cells_compare_with_the_forest():
    found, of_forest = [[2.0, 1.0, 1.0]] * 4, [[4.0, 1.0, 2.0]] * 4
    cell, _, last = cells(found, of_forest)
    assert cell == "2.000 (0.500 +- 0.000)"
    assert last == "1.000 (0.500 +- 0.000)"
    assert cells(found, found) == ["2.000", "1.000", "1.000"]


def test_the_script_ends(tmp_path, capsys):
    stores = np.random.default_rng(0).uniform(0, 5, (80, 164)).astype(np.float32)
    seconds = 1e-5 * (1.0 + stores[:, 3])
    about = np.frombuffer(b'{"workload": "made up"}', dtype=np.uint8)
    path = tmp_path / "pool.npz"
    np.savez(path, stores=stores, n_stores=np.ones(80, int), seconds=seconds, about=about)
    main([str(path), "--seeds", "1", "--out", str(tmp_path / "out.json")])
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert (tmp_path / "out.json").exists()
