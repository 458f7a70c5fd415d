CREATE TABLE tvm_adaptive_meta (
    key VARCHAR(64) NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (key)
);
CREATE TABLE tvm_adaptive_tasks (
    id SERIAL NOT NULL,
    workload_key VARCHAR(32) NOT NULL,
    target TEXT NOT NULL,
    target_key VARCHAR(64) NOT NULL,
    family VARCHAR(256) NOT NULL,
    name TEXT NOT NULL,
    workload TEXT NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (workload_key, target_key)
);
CREATE INDEX ix_tvm_adaptive_tasks_family ON tvm_adaptive_tasks (family);
CREATE TABLE tvm_adaptive_finals (
    id SERIAL NOT NULL,
    task_id INTEGER NOT NULL,
    record TEXT NOT NULL,
    seconds FLOAT,
    error FLOAT,
    failure TEXT NOT NULL,
    unix_sec FLOAT NOT NULL,
    run VARCHAR(64) NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(task_id) REFERENCES tvm_adaptive_tasks (id) ON DELETE CASCADE
);
CREATE INDEX ix_tvm_adaptive_finals_task_id ON tvm_adaptive_finals (task_id);
CREATE TABLE tvm_adaptive_trials (
    id SERIAL NOT NULL,
    task_id INTEGER NOT NULL,
    record TEXT NOT NULL,
    seconds FLOAT,
    error FLOAT,
    failure TEXT NOT NULL,
    features BYTEA,
    unix_sec FLOAT NOT NULL,
    run VARCHAR(64) NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(task_id) REFERENCES tvm_adaptive_tasks (id) ON DELETE CASCADE
);
CREATE INDEX tvm_adaptive_trials_by_time ON tvm_adaptive_trials (task_id, seconds);
