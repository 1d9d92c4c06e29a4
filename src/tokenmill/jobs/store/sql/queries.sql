-- All queries of the store, by name. States: 0 pending, 1 running, 2 done, 3 failed, 4 cancelled, 5 quarantined. They are
-- literals because a partial index is used only for constants.

-- name: add_batch
INSERT INTO batches (name, key, created_s, source, model_id, output, errors, reuse, priority, deadline_s, defaults)
VALUES (:name, :key, :now, :source, :model_id, :output, :errors, :reuse, :priority, :deadline_s, :defaults)
RETURNING id;

-- name: add_job
INSERT INTO jobs (id, batch, state,
                  custom_id, identity, place, rank, prompt_bytes, max_tokens, deadline_s, code, message, answer)
VALUES (?11, ?11 >> 32, CASE WHEN EXISTS (SELECT 1 FROM answers WHERE identity = ?3) THEN 2 ELSE ?1 END,
        ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, (SELECT id FROM answers WHERE identity = ?3))
ON CONFLICT (batch, custom_id) DO NOTHING;

-- name: add_block
INSERT INTO blocks (id, data) VALUES (?, ?);

-- name: added
SELECT state, count(*) FROM jobs WHERE id BETWEEN :first AND :last GROUP BY state;

-- name: count_added
UPDATE batches SET pending   = pending   + CASE :state WHEN 0 THEN :jobs ELSE 0 END,
                   running   = running   + CASE :state WHEN 1 THEN :jobs ELSE 0 END,
                   done      = done      + CASE :state WHEN 2 THEN :jobs ELSE 0 END,
                   failed    = failed    + CASE :state WHEN 3 THEN :jobs ELSE 0 END,
                   cancelled = cancelled + CASE :state WHEN 4 THEN :jobs ELSE 0 END,
                   set_aside = set_aside + CASE :state WHEN 5 THEN :jobs ELSE 0 END
WHERE id = :batch;

-- name: count_reused
UPDATE batches SET reused = reused + :jobs WHERE id = :batch;

-- name: set_lines
UPDATE batches SET lines = :lines WHERE id = :batch;

-- name: holder_of_custom_id
SELECT id FROM jobs WHERE batch = :batch AND custom_id = :custom_id;

-- name: last_job
SELECT max(id) FROM jobs WHERE id BETWEEN :first AND :last;

-- name: seal
UPDATE batches SET sealed_s = :now, key = :key WHERE id = :batch;

-- name: set_deadline
UPDATE batches SET deadline_s = :deadline_s WHERE id = :batch;

-- name: revive_expired
UPDATE jobs SET state = 0, code = NULL, message = NULL, not_before_s = NULL
WHERE batch = :batch AND state IN (3, 5) AND state = 3 AND code = 'deadline' AND :deadline_s > :now
  AND (deadline_s IS NULL OR deadline_s > :now);

-- name: set_priority
UPDATE batches SET priority = :priority WHERE id = :batch;

-- name: rank_jobs
UPDATE jobs SET rank = :rank WHERE id BETWEEN :first AND :last AND rank = :was AND identity IS NOT NULL;

-- name: drop_key
UPDATE batches SET key = NULL WHERE id = :batch;

-- name: mark_removed
UPDATE batches SET key = NULL, sealed_s = NULL WHERE id = :batch;

-- name: batches
SELECT id, name, key, created_s, sealed_s, cancelled_s, asked_s, source, model_id, output, errors, reuse, priority, deadline_s,
       defaults, lines, computed, reused, prompt_tokens, cached_tokens, completion_tokens, engine_s
FROM batches ORDER BY id;

-- name: batch
SELECT id, name, key, created_s, sealed_s, cancelled_s, asked_s, source, model_id, output, errors, reuse, priority, deadline_s,
       defaults, lines, computed, reused, prompt_tokens, cached_tokens, completion_tokens, engine_s
FROM batches WHERE id = :batch;

-- name: open_batches
SELECT id FROM batches
WHERE sealed_s IS NOT NULL AND cancelled_s IS NULL AND model_id = coalesce(:model_id, model_id) AND pending > 0
ORDER BY id;

-- name: batch_named
SELECT id FROM batches WHERE name = :name;

-- name: batch_by_key
SELECT id FROM batches WHERE key = :key;

-- name: removed_batches
SELECT id FROM batches WHERE sealed_s IS NULL AND key IS NULL;

-- name: counts
SELECT 0, pending FROM batches WHERE id = :batch
UNION ALL SELECT 1, running   FROM batches WHERE id = :batch
UNION ALL SELECT 2, done      FROM batches WHERE id = :batch
UNION ALL SELECT 3, failed    FROM batches WHERE id = :batch
UNION ALL SELECT 4, cancelled FROM batches WHERE id = :batch
UNION ALL SELECT 5, set_aside FROM batches WHERE id = :batch;

-- name: counts_of_all
SELECT id, 0, pending FROM batches
UNION ALL SELECT id, 1, running   FROM batches
UNION ALL SELECT id, 2, done      FROM batches
UNION ALL SELECT id, 3, failed    FROM batches
UNION ALL SELECT id, 4, cancelled FROM batches
UNION ALL SELECT id, 5, set_aside FROM batches;

-- name: waiting
SELECT id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths FROM jobs
WHERE batch = :batch AND state < 2 AND state = 0 AND (rank, place, id) > (:rank, :place, :id)
  AND (not_before_s IS NULL OR not_before_s <= :now)
ORDER BY rank, place, id LIMIT :limit;

-- Pending jobs between two positions of a batch, both excluded.

-- name: waiting_between
SELECT id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths FROM jobs
WHERE batch = :batch AND state < 2 AND state = 0
  AND (rank, place, id) > (:rank, :place, :id) AND (rank, place, id) < (:to_rank, :to_place, :to_id)
  AND (not_before_s IS NULL OR not_before_s <= :now) AND id NOT IN (SELECT value FROM json_each(:unfit))
ORDER BY rank, place, id LIMIT :limit;

-- name: count_between
SELECT count(*) FROM (
    SELECT 1 FROM jobs
    WHERE batch = :batch AND state < 2 AND state = 0
      AND (rank, place, id) > (:rank, :place, :id) AND (rank, place, id) < (:to_rank, :to_place, :to_id)
      AND (not_before_s IS NULL OR not_before_s <= :now) AND id NOT IN (SELECT value FROM json_each(:unfit))
    LIMIT :limit) AS found;

-- name: due
SELECT id, rank, place, prompt_bytes, max_tokens, deadline_s, attempts, deaths FROM jobs
WHERE state = 0 AND deadline_s IS NOT NULL AND deadline_s <= :before
  AND (not_before_s IS NULL OR not_before_s <= :now)
ORDER BY deadline_s LIMIT :limit;

-- name: next_retry
SELECT min(not_before_s) FROM jobs WHERE state = 0 AND not_before_s IS NOT NULL;

-- name: next_retry_of
SELECT min(not_before_s) FROM jobs WHERE batch = :batch AND state = 0 AND not_before_s IS NOT NULL;

-- name: job
SELECT id, custom_id, state, identity, place, rank, prompt_bytes, max_tokens, deadline_s, attempts, deaths
FROM jobs WHERE id = :job;

-- name: take
SELECT id, custom_id, state, identity, place, rank, prompt_bytes, max_tokens, deadline_s, attempts, deaths
FROM jobs WHERE id = :job AND state = 0;

-- name: block_of
SELECT id, data FROM blocks WHERE id <= :job ORDER BY id DESC LIMIT 1;

-- name: block_after
SELECT id, data FROM blocks WHERE id > :after AND id <= :last ORDER BY id LIMIT 1;

-- name: start
UPDATE jobs SET state = 1, attempts = attempts + 1, not_before_s = NULL WHERE id = :job AND state = 0;

-- name: add_answer
INSERT INTO answers (identity, body, created_s, prompt_tokens, completion_tokens, checksum)
SELECT identity, :body, :now, :prompt_tokens, :completion_tokens, :checksum
FROM jobs WHERE id = :job AND identity IS NOT NULL
ON CONFLICT (identity) DO NOTHING;

-- name: answer_job
UPDATE jobs SET state = 2, code = NULL, message = NULL,
       answer = (SELECT id FROM answers WHERE answers.identity = jobs.identity)
WHERE id = :job AND state IN (0, 1) AND EXISTS (SELECT 1 FROM answers WHERE answers.identity = jobs.identity);

-- name: add_totals
UPDATE batches SET computed = computed + :computed, prompt_tokens = prompt_tokens + :prompt_tokens,
       cached_tokens = cached_tokens + :cached_tokens, completion_tokens = completion_tokens + :completion_tokens,
       engine_s = engine_s + :engine_s
WHERE id = :batch;

-- name: fail
UPDATE jobs SET state = 3, code = :code, message = :message WHERE id = :job AND state IN (0, 1);

-- name: retry_later
UPDATE jobs SET state = 0, code = :code, message = :message, not_before_s = :not_before WHERE id = :job AND state = 1;

-- name: record_crash
UPDATE jobs SET deaths = deaths + 1, state = CASE WHEN deaths + 1 >= :most THEN 5 ELSE 0 END,
       code = :code, message = :message, not_before_s = :not_before
WHERE id = :job AND state = 1 RETURNING state;

-- name: release
UPDATE jobs SET state = 0, attempts = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END WHERE id = :job AND state = 1;

-- name: recover
UPDATE jobs SET state = 0, attempts = CASE WHEN attempts > 0 THEN attempts - 1 ELSE 0 END
WHERE id BETWEEN :batch << 32 AND :batch << 32 | 4294967295 AND state = 1;

-- name: with_running
SELECT id FROM batches WHERE running > 0;

-- name: cancel_waiting
UPDATE jobs SET state = 4, code = 'cancelled', message = 'the batch was cancelled'
WHERE batch = :batch AND state < 2 AND state = 0;

-- name: cancel_running
UPDATE jobs SET state = 4, code = 'cancelled', message = 'the batch was cancelled'
WHERE id BETWEEN :batch << 32 AND :batch << 32 | 4294967295 AND state = 1;

-- name: cancel_batch
UPDATE batches SET cancelled_s = :now, asked_s = NULL WHERE id = :batch;

-- name: ask_cancel
UPDATE batches SET asked_s = :now WHERE id = :batch AND cancelled_s IS NULL;

-- name: cancel_requests
SELECT id FROM batches WHERE asked_s IS NOT NULL;

-- name: retry_failed
UPDATE jobs SET state = 0, attempts = 0, deaths = 0, code = NULL, message = NULL, not_before_s = NULL
WHERE batch = :batch AND state IN (3, 5) AND code <> 'invalid_line';

-- name: retry_cancelled
UPDATE jobs SET state = 0, attempts = 0, deaths = 0, code = NULL, message = NULL, not_before_s = NULL
WHERE id BETWEEN :first AND :last AND state = 4;

-- name: reopen_batch
UPDATE batches SET cancelled_s = NULL, asked_s = NULL WHERE id = :batch;

-- name: expire_jobs
UPDATE jobs SET state = 3, code = 'deadline', message = 'the deadline passed before the job started'
WHERE state = 0 AND deadline_s IS NOT NULL AND deadline_s <= :now RETURNING id;

-- name: expire_batch
UPDATE jobs SET state = 3, code = 'deadline', message = 'the deadline of the batch passed before the job started'
WHERE batch = :batch AND state < 2 AND state = 0;

-- name: overdue_batches
SELECT id FROM batches WHERE deadline_s <= :now;

-- name: results
SELECT jobs.id & 4294967295, state, custom_id, jobs.identity, body, code, message,
       answer, checksum, answers.identity = jobs.identity
FROM jobs LEFT JOIN answers ON answers.id = jobs.answer
WHERE jobs.id > :after AND jobs.id <= :last ORDER BY jobs.id LIMIT :limit;

-- name: has_answer
SELECT 1 FROM answers WHERE identity = :identity;

-- name: answer_to
SELECT body, checksum FROM answers WHERE identity = :identity;

-- name: failures_by_code
SELECT code, count(*) FROM jobs WHERE batch = :batch AND state IN (3, 5) GROUP BY code ORDER BY code;

-- name: failures
SELECT id & 4294967295, state, custom_id, identity, NULL, code, message FROM jobs
WHERE batch = :batch AND state IN (3, 5) AND id > :after ORDER BY id LIMIT :limit;

-- name: answers_after
SELECT id, body, checksum FROM answers WHERE id > :after ORDER BY id LIMIT :limit;

-- name: answered
SELECT jobs.id, answer, answers.identity = jobs.identity
FROM jobs LEFT JOIN answers ON answers.id = jobs.answer
WHERE state = 2 AND jobs.id > :after ORDER BY jobs.id LIMIT :limit;

-- name: requeue
UPDATE jobs SET state = 0, answer = NULL, attempts = 0, deaths = 0, not_before_s = NULL WHERE id = :job AND state = 2;

-- name: forget_answer
DELETE FROM answers WHERE id = :answer;

-- name: forget_jobs
DELETE FROM jobs WHERE id BETWEEN :first AND :last;

-- name: forget_blocks
DELETE FROM blocks WHERE id BETWEEN :first AND :last;

-- name: forget_batch
DELETE FROM batches WHERE id = :batch;

-- Files and batches submitted over HTTP.

-- name: add_file
INSERT INTO files (id, owner, filename, purpose, bytes, sha256, created_s, expires_s)
VALUES (:id, :owner, :filename, :purpose, :bytes, :sha256, :created_s, :expires_s)
ON CONFLICT (id) DO NOTHING;

-- name: file
SELECT id, owner, filename, purpose, bytes, sha256, created_s, expires_s FROM files WHERE id = :id;

-- name: lock_file
SELECT 1 FROM files WHERE id = :id;

-- name: file_seq
SELECT seq FROM files WHERE id = :id;

-- name: files_before
SELECT id, owner, filename, purpose, bytes, sha256, created_s, expires_s FROM files
WHERE seq < :seq AND coalesce(owner = :owner, TRUE) AND coalesce(purpose = :purpose, TRUE) AND coalesce(expires_s > :now, TRUE)
      AND purpose <> 'response'
ORDER BY seq DESC LIMIT :limit;

-- name: files_after
SELECT id, owner, filename, purpose, bytes, sha256, created_s, expires_s FROM files
WHERE seq > :seq AND coalesce(owner = :owner, TRUE) AND coalesce(purpose = :purpose, TRUE) AND coalesce(expires_s > :now, TRUE)
      AND purpose <> 'response'
ORDER BY seq LIMIT :limit;

-- name: expired_files
SELECT id FROM files WHERE expires_s <= :now;

-- name: user_of_file
SELECT id FROM http_batches WHERE input_file_id = :id AND ended IS NULL LIMIT 1;

-- name: delete_file
DELETE FROM files WHERE id = :id;

-- name: add_http_batch
INSERT INTO http_batches (id, owner, endpoint, completion_window, input_file_id, metadata, priority, created_s, expires_s,
                          output_file_id, error_file_id, output_kept_s, model, in_progress_s, finalizing_s, cancelling_s,
                          ended_s, ended, errors, outcome)
VALUES (:id, :owner, :endpoint, :completion_window, :input_file_id, :metadata, :priority, :created_s, :expires_s,
        :output_file_id, :error_file_id, :output_kept_s, :model, :in_progress_s, :finalizing_s, :cancelling_s,
        :ended_s, :ended, :errors, :outcome)
ON CONFLICT (id) DO NOTHING;

-- name: http_batch
SELECT * FROM http_batch_states WHERE id = :id;

-- name: http_batch_seq
SELECT seq FROM http_batches WHERE id = :id;

-- name: http_batches_before
SELECT * FROM http_batch_states
WHERE seq < :seq AND coalesce(owner = :owner, TRUE) AND substr(id, 1, 5) <> 'resp_'
ORDER BY seq DESC LIMIT :limit;

-- name: submitted_files
SELECT http_batches.id, ended, http_batches.created_s, filename FROM http_batches
LEFT JOIN files ON files.id = input_file_id ORDER BY http_batches.seq;

-- name: unfinished_http_batches
SELECT * FROM http_batch_states WHERE ended IS NULL ORDER BY seq;

-- name: http_batches_by_status
SELECT ended, count(*) FROM http_batches WHERE ended IS NOT NULL GROUP BY ended
UNION ALL SELECT status, count(*) FROM http_batch_states WHERE ended IS NULL GROUP BY status;

-- name: set_http_batch_model
UPDATE http_batches SET model = :model WHERE id = :id;

-- name: finalize_http_batch
UPDATE http_batches SET finalizing_s = :now
WHERE id = :id AND ended IS NULL AND cancelling_s IS NULL AND finalizing_s IS NULL;

-- name: cancel_http_batch
UPDATE http_batches SET cancelling_s = :now
WHERE id = :id AND ended IS NULL AND cancelling_s IS NULL AND finalizing_s IS NULL;

-- name: end_http_batch
UPDATE http_batches
SET ended = :ended, ended_s = :now, errors = :errors, outcome = :outcome,
    in_progress_s = coalesce(in_progress_s, (SELECT sealed_s FROM batches WHERE name = http_batches.id))
WHERE id = :id AND ended IS NULL AND (cancelling_s IS NULL OR :cancelling = 1);
