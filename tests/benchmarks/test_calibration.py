"""The table of how calibrated forecasts were, from journals."""

from __future__ import annotations

import contextlib
import lzma
import math

from benchmarks.micro.calibration import cells_of, forecasts_of, main
from tvm_adaptive.measure_callback.journal import JOURNAL_FILE, Journal


def write_run(folder, *forecasts):
    folder.mkdir(parents=True)
    with contextlib.closing(Journal(folder / JOURNAL_FILE)) as journal:
        journal.write("start")
        for n, spearman, z_rms, *coverage in forecasts:
            more = {"coverage": coverage[0]} if coverage else {}
            journal.write("forecast", task="main", n=n, spearman=spearman, z_rms=z_rms, **more)


def test_batches_count_by_their_candidates(tmp_path):
    later = [(16, 0.4, 2.0, 0.5), (4, 0.8, 1.0, 1.0)]
    write_run(tmp_path / "te-GMM" / "long" / "0", (16, 0.6, 9.0, 0.1), *later)
    write_run(tmp_path / "te-GMM" / "long" / "1", (4, 0.6, None, None))
    ((key, events),) = forecasts_of(tmp_path).items()
    assert key == ("te-GMM", "long")
    rms = math.sqrt((16 * 4 + 4 * 1) / 20)
    assert cells_of(events) == ["4", "0.60", "9.00", f"{rms:.2f}", "60%"]


def test_journals_of_earlier_versions_have_no_coverage(tmp_path, capsys):
    write_run(tmp_path / "te-GMM" / "long" / "0", (16, 0.4, 2.0))
    path = tmp_path / "te-GMM" / "long" / "0" / JOURNAL_FILE
    path.with_name(f"{JOURNAL_FILE}.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    write_run(tmp_path / "te-GMM" / "stock" / "0")
    main([str(tmp_path)])
    *_, line = capsys.readouterr().out.splitlines()
    assert line == "| te-GMM | long | 1 | 0.40 | 2.00 |  |  |"
