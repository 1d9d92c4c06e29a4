-- Queries that differ on PostgreSQL from those of the same name in queries.sql, and queries for several workers (runners).
-- Advisory locks use the OID of the table of batches as their class, so that several stores can share a database.

-- name: tables
SELECT relname FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = current_schema() AND relname IN ('tokenmill', 'batches', 'jobs', 'blocks', 'answers', 'counts', 'totals',
                                                 'runners', 'stretches', 'files', 'http_batches');

-- name: version
SELECT version FROM tokenmill;

-- name: schema_there
SELECT current_schema();

-- name: lock_setup
SELECT pg_advisory_xact_lock(:key);

-- name: backend
SELECT pg_backend_pid(), (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()),
       extract(epoch FROM clock_timestamp())::float8;

-- name: end_backend
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND backend_start = :began;

-- name: backend_there
SELECT 1 FROM pg_stat_activity WHERE pid = :pid AND backend_start = :began;

-- name: coming
CREATE TEMPORARY TABLE coming (
    state BIGINT, custom_id TEXT, identity BYTEA, place BYTEA, rank BIGINT, prompt_bytes BIGINT, max_tokens BIGINT,
    deadline_s DOUBLE PRECISION, code TEXT, message TEXT, id BIGINT
) ON COMMIT DELETE ROWS;

-- name: add_batch
INSERT INTO batches (name, key, created_s, source, model_id, output, errors, reuse, priority, deadline_s, defaults)
VALUES (:name, :key, :now, :source, :model_id, :output, :errors, :reuse, :priority, :deadline_s, :defaults)
ON CONFLICT (key) DO NOTHING RETURNING id;

-- name: add_job_rows
COPY coming FROM STDIN (FORMAT BINARY);

-- name: add_job
INSERT INTO jobs (id, batch, state, custom_id, identity, place, rank, prompt_bytes, max_tokens, deadline_s, code, message,
                  answer)
SELECT coming.id, coming.id >> 32, CASE WHEN answers.id IS NULL THEN state ELSE 2 END, custom_id, coming.identity, place,
       rank, prompt_bytes, max_tokens, deadline_s, code, message, answers.id
FROM coming LEFT JOIN answers ON answers.identity = coming.identity ORDER BY coming.id
ON CONFLICT (batch, custom_id) DO NOTHING;

-- name: count_added
INSERT INTO counts (batch, state, jobs) VALUES (:batch, :state, :jobs);

-- name: open_batches
SELECT id FROM batches
WHERE sealed_s IS NOT NULL AND cancelled_s IS NULL AND model_id = coalesce(:model_id, model_id)
  AND EXISTS (SELECT 1 FROM jobs WHERE jobs.batch = batches.id AND state = 0)
ORDER BY id;

-- name: cancel_running
UPDATE jobs SET state = 4, code = 'cancelled', message = 'the batch was cancelled' WHERE batch = :batch AND state = 1;

-- name: counts
SELECT state, sum(jobs)::bigint FROM counts WHERE batch = :batch GROUP BY state ORDER BY state;

-- name: counts_of_all
SELECT batch, state, sum(jobs)::bigint FROM counts GROUP BY batch, state;

-- name: count_reused
INSERT INTO totals (batch, reused) VALUES (:batch, :jobs);

-- name: add_totals
INSERT INTO totals (batch, computed, prompt_tokens, cached_tokens, completion_tokens, engine_s)
VALUES (:batch, :computed, :prompt_tokens, :cached_tokens, :completion_tokens, :engine_s);

-- name: batches
SELECT id, name, key, created_s, sealed_s, cancelled_s, asked_s, source, model_id, output, errors, reuse, priority, deadline_s,
       defaults, lines, coalesce(computed, 0), coalesce(reused, 0), coalesce(prompt_tokens, 0), coalesce(cached_tokens, 0),
       coalesce(completion_tokens, 0), coalesce(engine_s, 0)
FROM batches LEFT JOIN (
    SELECT batch, sum(computed)::bigint AS computed, sum(reused)::bigint AS reused,
           sum(prompt_tokens)::bigint AS prompt_tokens, sum(cached_tokens)::bigint AS cached_tokens,
           sum(completion_tokens)::bigint AS completion_tokens, sum(engine_s) AS engine_s
    FROM totals GROUP BY batch) AS spent ON spent.batch = id
ORDER BY id;

-- name: batch
SELECT id, name, key, created_s, sealed_s, cancelled_s, asked_s, source, model_id, output, errors, reuse, priority, deadline_s,
       defaults, lines, coalesce(computed, 0), coalesce(reused, 0), coalesce(prompt_tokens, 0), coalesce(cached_tokens, 0),
       coalesce(completion_tokens, 0), coalesce(engine_s, 0)
FROM batches, (
    SELECT sum(computed)::bigint AS computed, sum(reused)::bigint AS reused,
           sum(prompt_tokens)::bigint AS prompt_tokens, sum(cached_tokens)::bigint AS cached_tokens,
           sum(completion_tokens)::bigint AS completion_tokens, sum(engine_s) AS engine_s
    FROM totals WHERE batch = :batch) AS spent
WHERE id = :batch;

-- name: take
SELECT id, custom_id, state, identity, place, rank, prompt_bytes, max_tokens, deadline_s, attempts, deaths
FROM jobs WHERE id = :job AND state = 0 FOR UPDATE SKIP LOCKED;

-- name: start
UPDATE jobs SET state = 1, attempts = attempts + 1, not_before_s = NULL, runner = :runner WHERE id = :job AND state = 0;

-- name: overdue_batches
SELECT id FROM batches
WHERE deadline_s <= :now AND EXISTS (SELECT 1 FROM jobs WHERE jobs.batch = batches.id AND state = 0);

-- name: removed_batches
SELECT id FROM batches WHERE sealed_s IS NULL AND key IS NULL AND reader NOT IN (SELECT id FROM runners);

-- name: forget_batch
WITH no_counts AS (DELETE FROM counts WHERE batch = :batch), no_totals AS (DELETE FROM totals WHERE batch = :batch)
DELETE FROM batches WHERE id = :batch;

-- name: lock_file
SELECT 1 FROM files WHERE id = :id FOR UPDATE;

-- name: fold_counts
WITH many AS (SELECT batch, state FROM counts GROUP BY batch, state HAVING count(*) > 1),
     gone AS (DELETE FROM counts USING many WHERE counts.batch = many.batch AND counts.state = many.state
              RETURNING counts.batch, counts.state, counts.jobs)
INSERT INTO counts SELECT batch, state, sum(jobs) FROM gone GROUP BY batch, state;

-- name: fold_totals
WITH many AS (SELECT batch FROM totals GROUP BY batch HAVING count(*) > 1),
     gone AS (DELETE FROM totals USING many WHERE totals.batch = many.batch RETURNING totals.*)
INSERT INTO totals SELECT batch, sum(computed), sum(reused), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens),
                          sum(engine_s)
FROM gone GROUP BY batch;

-- name: add_runner
INSERT INTO runners (host, kernel, pid, ticks, lease_until)
VALUES (:host, :kernel, :pid, :ticks, clock_timestamp() + :lease_s * interval '1 second')
RETURNING id;

-- name: renew
INSERT INTO runners (id, host, kernel, pid, ticks, lease_until)
VALUES (:runner, :host, :kernel, :pid, :ticks, clock_timestamp() + :lease_s * interval '1 second')
ON CONFLICT (id) DO UPDATE SET seen = clock_timestamp(), lease_until = excluded.lease_until;

-- name: runners
SELECT id, host, pid, extract(epoch FROM clock_timestamp() - started)::float8,
       extract(epoch FROM clock_timestamp() - seen)::float8, lease_until > clock_timestamp(),
       (SELECT count(*) FROM jobs WHERE state = 1 AND runner = runners.id)
FROM runners ORDER BY id;

-- name: runners_of
SELECT id, host, pid, extract(epoch FROM clock_timestamp() - started)::float8,
       extract(epoch FROM clock_timestamp() - seen)::float8, lease_until > clock_timestamp(), running
FROM runners, LATERAL (SELECT count(*) AS running FROM jobs WHERE batch = :batch AND state = 1 AND runner = runners.id) AS at
WHERE running > 0 OR id IN (SELECT reader FROM batches WHERE id = :batch AND sealed_s IS NULL)
   OR id IN (SELECT runner FROM stretches WHERE first_batch = :batch OR last_batch = :batch)
ORDER BY id;

-- name: runners_here
SELECT id, pid, ticks FROM runners WHERE kernel = :kernel;

-- name: drop_runner
DELETE FROM runners WHERE id = :runner;

-- name: drop_expired
DELETE FROM runners WHERE id IN (SELECT id FROM runners WHERE lease_until < clock_timestamp() FOR UPDATE SKIP LOCKED);

-- name: recover_lost
UPDATE jobs SET lost = lost + 1, deaths = deaths + CASE WHEN lost > 0 THEN 1 ELSE 0 END, code = :code, message = :message,
       attempts = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END,
       state = CASE WHEN lost > 0 AND deaths + 1 >= :most THEN 5 ELSE 0 END
WHERE state = 1 AND (runner IS NULL OR NOT EXISTS (SELECT 1 FROM runners WHERE runners.id = jobs.runner));

-- name: retry_failed
UPDATE jobs SET state = 0, attempts = 0, deaths = 0, lost = 0, code = NULL, message = NULL, not_before_s = NULL
WHERE batch = :batch AND state IN (3, 5) AND code <> 'invalid_line';

-- name: retry_cancelled
UPDATE jobs SET state = 0, attempts = 0, deaths = 0, lost = 0, code = NULL, message = NULL, not_before_s = NULL
WHERE id BETWEEN :first AND :last AND state = 4;

-- name: release_jobs
UPDATE jobs SET state = 0, attempts = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END
WHERE state = 1 AND runner = :runner AND NOT id = ANY (:kept);

-- name: fail
UPDATE jobs SET state = 3, code = :code, message = :message
WHERE id = :job AND (state = 0 OR state = 1 AND runner = :runner);

-- name: retry_later
UPDATE jobs SET state = 0, code = :code, message = :message, not_before_s = :not_before
WHERE id = :job AND state = 1 AND runner = :runner;

-- name: record_crash
UPDATE jobs SET deaths = deaths + 1, state = CASE WHEN deaths + 1 >= :most THEN 5 ELSE 0 END,
       code = :code, message = :message, not_before_s = :not_before
WHERE id = :job AND state = 1 AND runner = :runner RETURNING state;

-- name: release
UPDATE jobs SET state = 0, attempts = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END
WHERE id = :job AND state = 1 AND runner = :runner;

-- name: cancelled_of
SELECT DISTINCT batch FROM jobs WHERE id = ANY (:jobs) AND state = 4;

-- name: claim_identity
SELECT pg_try_advisory_xact_lock(:key);

-- name: identity_running
SELECT 1 FROM jobs WHERE identity = :identity AND state = 1;

-- name: claim_storing
UPDATE batches SET reader = :runner
WHERE id = :batch AND (reader IS NULL OR reader = :runner OR reader NOT IN (SELECT id FROM runners));

-- name: reader_of
SELECT host, pid FROM runners JOIN batches ON reader = runners.id WHERE batches.id = :batch AND reader <> :runner;

-- name: claim
SELECT pg_try_advisory_lock('batches'::regclass::oid::int, :key);

-- name: claimed
SELECT 1 FROM pg_locks
WHERE locktype = 'advisory' AND classid = 'batches'::regclass::oid AND objid::bigint = :key AND objsubid = 2 AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: unclaim
SELECT pg_advisory_unlock_all();

-- name: try_lock
SELECT pg_try_advisory_xact_lock('batches'::regclass::oid::int, :key);

-- name: lock
SELECT pg_advisory_xact_lock('batches'::regclass::oid::int, :key);

-- name: register_worker
UPDATE runners SET lanes = :lanes, jobs = :jobs, jobs_s = :jobs_s, behind = :behind WHERE id = :runner;

-- name: set_assigned_jobs
UPDATE runners SET jobs = :jobs WHERE id = :runner;

-- name: registered_workers
SELECT runners.id, lanes, runners.jobs, jobs_s,
       at.id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths
FROM runners LEFT JOIN jobs AS at ON at.id = behind WHERE lanes IS NOT NULL ORDER BY runners.id;

-- name: shards
SELECT id, runner, first_rank, first_batch, first_place, first_id, last_rank, last_batch, last_place, last_id, jobs, ahead
FROM stretches ORDER BY id;

-- name: add_shard
INSERT INTO stretches (runner, first_rank, first_batch, first_place, first_id, last_rank, last_batch, last_place, last_id,
                       jobs, ahead)
VALUES (:runner, :first_rank, :first_batch, :first_place, :first_id, :last_rank, :last_batch, :last_place, :last_id, :jobs,
        :ahead)
RETURNING id;

-- name: shorten_shard
UPDATE stretches SET last_rank = :last_rank, last_batch = :last_batch, last_place = :last_place, last_id = :last_id,
                     jobs = :jobs
WHERE id = :shard;

-- name: drop_shard
DELETE FROM stretches WHERE id = :shard;

-- name: drop_shards
DELETE FROM stretches WHERE runner = :runner;

-- Pending jobs between two positions of a batch, both excluded, for many pairs in one query. Only the first column of a row
-- comparison ends an index scan: (rank, place, id) < (...) would scan all rows with the same rank, so it is not used. The
-- inner ORDER BY selects the index. All server versions hash NOT IN (SELECT ...), but scan NOT id = ANY (...) per row.

-- name: first_between
SELECT job.*
FROM unnest(:batches::bigint[], :ranks::bigint[], :places::bytea[], :ids::bigint[],
            :to_ranks::bigint[], :to_places::bytea[], :to_ids::bigint[])
     AS span (batch, rank, place, id, to_rank, to_place, to_id),
LATERAL (
    (SELECT id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths FROM jobs
     WHERE span.rank < span.to_rank AND batch = span.batch AND state = 0
       AND (rank, place, id) > (span.rank, span.place, span.id) AND rank < span.to_rank
       AND (not_before_s IS NULL OR not_before_s <= :now) AND id NOT IN (SELECT unnest(:unfit::bigint[]))
     ORDER BY rank, place, id LIMIT 1)
    UNION ALL
    (SELECT id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths FROM jobs
     WHERE batch = span.batch AND state = 0 AND rank = span.to_rank
       AND (place, id) > (CASE WHEN span.rank < span.to_rank THEN '' ELSE span.place END,
                          CASE WHEN span.rank < span.to_rank THEN -1 ELSE span.id END)
       AND (place, id) < (span.to_place, span.to_id)
       AND (not_before_s IS NULL OR not_before_s <= :now) AND id NOT IN (SELECT unnest(:unfit::bigint[]))
     ORDER BY place, id LIMIT 1)) AS job
ORDER BY job.rank, span.batch, job.place, job.id LIMIT 1;

-- Spans must have a single priority, as shards (stretches) have.

-- name: count_between
SELECT (SELECT count(*) FROM (
            SELECT 1 FROM jobs
            WHERE batch = span.batch AND state = 0 AND rank = span.rank
              AND (place, id) > (span.place, span.id) AND (place, id) < (span.to_place, span.to_id)
              AND (not_before_s IS NULL OR not_before_s <= :now) AND id NOT IN (SELECT unnest(:unfit::bigint[]))
            ORDER BY place, id LIMIT :limit) AS found)
FROM unnest(:batches::bigint[], :ranks::bigint[], :places::bytea[], :ids::bigint[],
            :to_ranks::bigint[], :to_places::bytea[], :to_ids::bigint[])
     WITH ORDINALITY AS span (batch, rank, place, id, to_rank, to_place, to_id, at)
ORDER BY at;

-- name: waiting_between
SELECT at, job.*
FROM unnest(:batches::bigint[], :ranks::bigint[], :places::bytea[], :ids::bigint[],
            :to_ranks::bigint[], :to_places::bytea[], :to_ids::bigint[])
     WITH ORDINALITY AS span (batch, rank, place, id, to_rank, to_place, to_id, at),
LATERAL (SELECT id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths FROM jobs
         WHERE batch = span.batch AND state = 0 AND rank = span.rank
           AND (place, id) > (span.place, span.id) AND (place, id) < (span.to_place, span.to_id)
           AND (not_before_s IS NULL OR not_before_s <= :now) AND id NOT IN (SELECT unnest(:unfit::bigint[]))
         ORDER BY place, id LIMIT :limit) AS job
ORDER BY at, job.place, job.id;

-- Which jobs workers can run, for `postgres_shards`.

-- name: set_worker_spec
UPDATE runners SET model_id = :model_id, room = :room, batches = :batches WHERE id = :runner;

-- name: worker_specs
SELECT id, model_id, room, batches FROM runners WHERE model_id IS NOT NULL;
