PRAGMA user_version = 1;

CREATE INDEX batches_input ON batches (input_file_id);

CREATE INDEX batches_open ON batches (seq) WHERE status NOT IN ('failed', 'completed', 'expired', 'cancelled');

CREATE TABLE batches (
seq INTEGER PRIMARY KEY AUTOINCREMENT,
id TEXT NOT NULL UNIQUE,
owner TEXT,
endpoint TEXT NOT NULL,
window TEXT NOT NULL,
input_file_id TEXT NOT NULL,
metadata TEXT,
priority INTEGER NOT NULL,
status TEXT NOT NULL,
created_s REAL NOT NULL,
expires_s REAL NOT NULL,
output_file_id TEXT NOT NULL,
error_file_id TEXT NOT NULL,
output_kept_s INTEGER,
model TEXT,
times TEXT NOT NULL,
errors TEXT,
outcome TEXT
);

CREATE TABLE files (
seq INTEGER PRIMARY KEY AUTOINCREMENT,
id TEXT NOT NULL UNIQUE,
owner TEXT,
filename TEXT NOT NULL,
purpose TEXT NOT NULL,
bytes INTEGER NOT NULL,
sha256 TEXT NOT NULL,
created_s REAL NOT NULL,
expires_s REAL
);

CREATE TABLE sqlite_sequence(name,seq);
