"""Names of files in a run's directory that several stages read and write."""

from __future__ import annotations

from typing import Final

# MetaSchedule's JSON database; its records name workloads by their lines.
WORKLOAD_FILE: Final = "database_workload.json"
RECORD_FILE: Final = "database_tuning_record.json"
# The database of winners, and where it is written first.
FINAL_DIR: Final = "final"
FRESH_DIR: Final = f"{FINAL_DIR}.new"
