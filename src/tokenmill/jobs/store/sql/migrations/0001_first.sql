-- Version 1: from nothing.

CREATE TABLE batches (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    name        TEXT    NOT NULL UNIQUE,
    key         BLOB    UNIQUE,            -- model, content and output: what the same command finds again
    created_s   REAL    NOT NULL,
    sealed_s    REAL,                      -- NULL: not all lines are stored yet
    cancelled_s REAL,
    asked_s     REAL,                      -- another process asks to cancel
    source      TEXT    NOT NULL,
    model_id    TEXT    NOT NULL,
    output      TEXT,
    errors      TEXT,
    reuse       INTEGER NOT NULL,
    priority    INTEGER NOT NULL,
    deadline_s  REAL,
    defaults    TEXT    NOT NULL,          -- JSON
    lines       INTEGER NOT NULL DEFAULT 0,
    computed          INTEGER NOT NULL DEFAULT 0,
    reused            INTEGER NOT NULL DEFAULT 0,
    prompt_tokens     INTEGER NOT NULL DEFAULT 0,
    cached_tokens     INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    engine_s          REAL    NOT NULL DEFAULT 0
);

-- Jobs by batch and state, so that a status reads six rows and not a million.
CREATE TABLE counts (
    batch INTEGER NOT NULL,
    state INTEGER NOT NULL,
    jobs  INTEGER NOT NULL,
    PRIMARY KEY (batch, state)
) WITHOUT ROWID;

CREATE TABLE jobs (
    id           INTEGER PRIMARY KEY,      -- batch << 32 | line: the table is in the order of the files
    batch        INTEGER NOT NULL,
    state        INTEGER NOT NULL,         -- job.State
    custom_id    TEXT,
    identity     BLOB,                     -- NULL: a bad line
    place        BLOB,
    rank         INTEGER NOT NULL,         -- the negative of the priority
    prompt_bytes INTEGER,
    max_tokens   INTEGER,
    deadline_s   REAL,
    code         TEXT,
    message      TEXT,
    attempts     INTEGER NOT NULL DEFAULT 0,
    deaths       INTEGER NOT NULL DEFAULT 0,
    not_before_s REAL,
    answer       INTEGER                   -- answers.id
);

-- The text of the lines, many in a row: a row for each would cost as much again as the job itself.
CREATE TABLE blocks (
    id   INTEGER PRIMARY KEY,              -- of the block's first line, as in jobs
    data BLOB NOT NULL
);

-- Never changed, never deleted while a job points there.
CREATE TABLE answers (
    id                INTEGER PRIMARY KEY,
    identity          BLOB    NOT NULL UNIQUE,
    body              BLOB    NOT NULL,
    created_s         REAL    NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL
);

CREATE UNIQUE INDEX jobs_custom_id ON jobs (batch, custom_id);
CREATE INDEX jobs_waiting  ON jobs (batch, rank, place, id) WHERE state = 0;
CREATE INDEX jobs_later    ON jobs (not_before_s) WHERE state = 0 AND not_before_s IS NOT NULL;
CREATE INDEX jobs_deadline ON jobs (deadline_s)   WHERE state = 0 AND deadline_s IS NOT NULL;
CREATE INDEX jobs_running  ON jobs (batch) WHERE state = 1;
CREATE INDEX jobs_failed   ON jobs (batch, id) WHERE state IN (3, 5);

-- Insertions are counted by who inserts: a trigger would run a million times in a submit.
CREATE TRIGGER jobs_counted AFTER UPDATE OF state ON jobs WHEN old.state <> new.state BEGIN
    UPDATE counts SET jobs = jobs - 1 WHERE batch = old.batch AND state = old.state;
    UPDATE counts SET jobs = jobs + 1 WHERE batch = new.batch AND state = new.state;
END;
