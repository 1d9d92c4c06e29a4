-- Answers have a checksum of their body; those from before have none.
ALTER TABLE answers ADD COLUMN checksum BYTEA;
UPDATE tokenmill SET version = 3;
