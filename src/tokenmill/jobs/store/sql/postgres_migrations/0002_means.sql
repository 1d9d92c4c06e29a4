-- Runners say what they can do before they have loaded an engine.
ALTER TABLE runners ADD COLUMN model_id TEXT, ADD COLUMN room BIGINT, ADD COLUMN batches BIGINT[];
UPDATE tokenmill SET version = 2;
