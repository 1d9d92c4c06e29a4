-- Version 2: counters in the row of their batch, one index of open jobs, checksums of answers.

ALTER TABLE batches ADD COLUMN pending INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN running INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN done INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN failed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN cancelled INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN set_aside INTEGER NOT NULL DEFAULT 0;
UPDATE batches SET
    pending = coalesce((SELECT jobs FROM counts WHERE batch = batches.id AND state = 0), 0),
    running = coalesce((SELECT jobs FROM counts WHERE batch = batches.id AND state = 1), 0),
    done = coalesce((SELECT jobs FROM counts WHERE batch = batches.id AND state = 2), 0),
    failed = coalesce((SELECT jobs FROM counts WHERE batch = batches.id AND state = 3), 0),
    cancelled = coalesce((SELECT jobs FROM counts WHERE batch = batches.id AND state = 4), 0),
    set_aside = coalesce((SELECT jobs FROM counts WHERE batch = batches.id AND state = 5), 0);

DROP TRIGGER jobs_counted;
DROP TABLE counts;
CREATE TRIGGER jobs_counted AFTER UPDATE OF state ON jobs WHEN old.state <> new.state BEGIN
    UPDATE batches SET pending   = pending   + (new.state = 0) - (old.state = 0),
                       running   = running   + (new.state = 1) - (old.state = 1),
                       done      = done      + (new.state = 2) - (old.state = 2),
                       failed    = failed    + (new.state = 3) - (old.state = 3),
                       cancelled = cancelled + (new.state = 4) - (old.state = 4),
                       set_aside = set_aside + (new.state = 5) - (old.state = 5)
    WHERE id = new.batch;
END;

DROP INDEX jobs_waiting;
DROP INDEX jobs_running;
CREATE INDEX jobs_open ON jobs (batch, rank, place, id) WHERE state < 2;

ALTER TABLE answers ADD COLUMN checksum BLOB;
