-- The complete schema of version 3. Changes are made both here and in a new file in migrations/; a test compares the
-- results.
--
-- A transaction writes every page that it changes completely to the write-ahead log. Therefore the counters of a batch are
-- columns of its row, and starting a job does not change the index of open jobs.

CREATE TABLE batches (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    name        TEXT    NOT NULL UNIQUE,
    key         BLOB    UNIQUE,            -- hash of model, content and output; identifies the batch of a command
    created_s   REAL    NOT NULL,
    sealed_s    REAL,                      -- NULL: not all lines are stored
    cancelled_s REAL,
    asked_s     REAL,                      -- when another process requested the cancellation
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
    engine_s          REAL    NOT NULL DEFAULT 0,
    pending   INTEGER NOT NULL DEFAULT 0,  -- number of jobs by state
    running   INTEGER NOT NULL DEFAULT 0,
    done      INTEGER NOT NULL DEFAULT 0,
    failed    INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    set_aside INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE jobs (
    id           INTEGER PRIMARY KEY,      -- batch << 32 | line
    batch        INTEGER NOT NULL,
    state        INTEGER NOT NULL,         -- models.State
    custom_id    TEXT,
    identity     BLOB,                     -- NULL: an invalid line
    place        BLOB,
    rank         INTEGER NOT NULL,         -- negative priority
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

-- The text of the lines, many per row: one row per line would double the cost of a job.
CREATE TABLE blocks (
    id   INTEGER PRIMARY KEY,              -- jobs.id of the block's first line
    data BLOB NOT NULL
);

-- Never changed, and never deleted while a job refers to it.
CREATE TABLE answers (
    id                INTEGER PRIMARY KEY,
    identity          BLOB    NOT NULL UNIQUE,
    body              BLOB    NOT NULL,
    created_s         REAL    NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    checksum          BLOB                 -- of the body; NULL: stored by version 1
);

CREATE UNIQUE INDEX jobs_custom_id ON jobs (batch, custom_id);
CREATE INDEX jobs_open     ON jobs (batch, rank, place, id) WHERE state < 2;
CREATE INDEX jobs_later    ON jobs (not_before_s) WHERE state = 0 AND not_before_s IS NOT NULL;
CREATE INDEX jobs_deadline ON jobs (deadline_s)   WHERE state = 0 AND deadline_s IS NOT NULL;
CREATE INDEX jobs_failed   ON jobs (batch, id) WHERE state IN (3, 5);

-- Insertions are counted by the inserting code, because a trigger would run once per line.
CREATE TRIGGER jobs_counted AFTER UPDATE OF state ON jobs WHEN old.state <> new.state BEGIN
    UPDATE batches SET pending   = pending   + (new.state = 0) - (old.state = 0),
                       running   = running   + (new.state = 1) - (old.state = 1),
                       done      = done      + (new.state = 2) - (old.state = 2),
                       failed    = failed    + (new.state = 3) - (old.state = 3),
                       cancelled = cancelled + (new.state = 4) - (old.state = 4),
                       set_aside = set_aside + (new.state = 5) - (old.state = 5)
    WHERE id = new.batch;
END;

-- Files and batches submitted over HTTP. The contents of the files are in the gateway's folder.
CREATE TABLE files (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT    NOT NULL UNIQUE,     -- also the name of the file with the content
    owner     TEXT,                        -- name of an API key; NULL: sent without a key
    filename  TEXT    NOT NULL,            -- as given by the client; only displayed
    purpose   TEXT    NOT NULL,
    bytes     INTEGER NOT NULL,
    sha256    TEXT    NOT NULL,
    created_s REAL    NOT NULL,
    expires_s REAL
);

CREATE TABLE http_batches (
    seq               INTEGER PRIMARY KEY AUTOINCREMENT,
    id                TEXT    NOT NULL UNIQUE,  -- also the name of its job batch
    owner             TEXT,
    endpoint          TEXT    NOT NULL,
    completion_window TEXT    NOT NULL,
    input_file_id     TEXT    NOT NULL,
    metadata          TEXT,                     -- JSON
    priority          INTEGER NOT NULL,
    created_s         REAL    NOT NULL,
    expires_s         REAL    NOT NULL,
    output_file_id    TEXT    NOT NULL,
    error_file_id     TEXT    NOT NULL,
    output_kept_s     INTEGER,                  -- seconds; NULL: results are kept until they are deleted
    model             TEXT,                     -- named in its lines
    in_progress_s     REAL,                     -- NULL: see sealed_s of the job batch
    finalizing_s      REAL,
    cancelling_s      REAL,
    ended_s           REAL,
    ended             TEXT,                     -- final status; NULL: see http_batch_states
    errors            TEXT,                     -- JSON: errors in the input file
    outcome           TEXT                      -- JSON: counts and totals at the end
);

CREATE INDEX http_batches_open  ON http_batches (seq) WHERE ended IS NULL;
CREATE INDEX http_batches_input ON http_batches (input_file_id) WHERE ended IS NULL;

-- The status of an HTTP batch, from its own columns (the client's request and the steps of the gateway) and from the progress
-- of its job batch. When it ends, counts and totals are copied to it, because its result files no longer change.
CREATE VIEW http_batch_states AS
SELECT seq, http_batches.id AS id, owner, endpoint, completion_window, input_file_id, metadata,
       http_batches.priority AS priority, http_batches.created_s AS created_s, expires_s,
       output_file_id, error_file_id, output_kept_s, model,
       CASE WHEN ended IS NOT NULL THEN ended
            WHEN cancelling_s IS NOT NULL THEN 'cancelling'
            WHEN finalizing_s IS NOT NULL THEN 'finalizing'
            WHEN sealed_s IS NOT NULL THEN 'in_progress'
            ELSE 'validating' END AS status,
       coalesce(in_progress_s, sealed_s) AS in_progress_s, finalizing_s, cancelling_s, ended_s, ended,
       http_batches.errors AS errors, outcome,
       batches.id AS job_batch, done, failed + cancelled + set_aside AS undone,
       pending + running + done + failed + cancelled + set_aside AS total,
       computed, reused, prompt_tokens, cached_tokens, completion_tokens, engine_s
FROM http_batches LEFT JOIN batches ON batches.name = http_batches.id;
