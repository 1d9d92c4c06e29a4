-- Version 3: files and batches that were submitted by HTTP. They were in a database of the gateway's own, desk.db.

CREATE TABLE files (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT    NOT NULL UNIQUE,
    owner     TEXT,
    filename  TEXT    NOT NULL,
    purpose   TEXT    NOT NULL,
    bytes     INTEGER NOT NULL,
    sha256    TEXT    NOT NULL,
    created_s REAL    NOT NULL,
    expires_s REAL
);

CREATE TABLE http_batches (
    seq               INTEGER PRIMARY KEY AUTOINCREMENT,
    id                TEXT    NOT NULL UNIQUE,
    owner             TEXT,
    endpoint          TEXT    NOT NULL,
    completion_window TEXT    NOT NULL,
    input_file_id     TEXT    NOT NULL,
    metadata          TEXT,
    priority          INTEGER NOT NULL,
    created_s         REAL    NOT NULL,
    expires_s         REAL    NOT NULL,
    output_file_id    TEXT    NOT NULL,
    error_file_id     TEXT    NOT NULL,
    output_kept_s     INTEGER,
    model             TEXT,
    in_progress_s     REAL,
    finalizing_s      REAL,
    cancelling_s      REAL,
    ended_s           REAL,
    ended             TEXT,
    errors            TEXT,
    outcome           TEXT
);

CREATE INDEX http_batches_open  ON http_batches (seq) WHERE ended IS NULL;
CREATE INDEX http_batches_input ON http_batches (input_file_id) WHERE ended IS NULL;

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
