PRAGMA application_id = 0;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE batches (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    id             TEXT NOT NULL UNIQUE,   -- its name in the store, too
    owner          TEXT,
    endpoint       TEXT NOT NULL,
    window         TEXT NOT NULL,
    input_file_id  TEXT NOT NULL,
    metadata       TEXT,                   -- JSON
    priority       INTEGER NOT NULL,
    status         TEXT NOT NULL,
    created_s      REAL NOT NULL,
    expires_s      REAL NOT NULL,
    output_file_id TEXT NOT NULL,          -- drawn at once: the store names a batch's output from the start
    error_file_id  TEXT NOT NULL,
    output_kept_s  INTEGER,                -- how long its results are kept; NULL: until they are deleted
    model          TEXT,                   -- what its lines ask for
    times          TEXT NOT NULL,          -- JSON: when it came to each status
    errors         TEXT,                   -- JSON: why the file was refused
    outcome        TEXT                    -- JSON: counts and totals at its end
);
INSERT INTO "batches" VALUES(1,'batch_b1c6981b754b5d2d','eva','/v1/completions','24h','file-bc61722e93c25a6111fce6f4','{"night": "one", "key": "1"}',3,'completed',1000000.0,1086400.0,'file-6ab9b888bc1389b300fa3c59','file-215ec7015d4e730c69dcdb8c',7200,'fake','{"validating": 1000000.0, "in_progress": 1000000.0, "finalizing": 1000000.0, "completed": 1000000.0}',NULL,'[2, 1, 3, {"computed": 2, "reused": 0, "prompt_tokens": 8, "cached_tokens": 0, "completion_tokens": 8, "engine_s": 0.03646618099992338}]');
INSERT INTO "batches" VALUES(2,'batch_27561a4ca69ff0aa','eva','/v1/completions','1h','file-9f5d89cba69557e0c2d43da9',NULL,0,'expired',1000010.0,1003610.0,'file-48f107b8173c35c38931bd5b','file-8f084f5f9e9135177c24d4e8',NULL,'fake','{"validating": 1000010.0, "in_progress": 1000010.0, "finalizing": 1003611.0, "expired": 1003611.0}',NULL,'[1, 4, 5, {"computed": 1, "reused": 0, "prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 4, "engine_s": 0.027524384999878748}]');
INSERT INTO "batches" VALUES(3,'batch_7d5c9142f29a7821','adam','/v1/completions','24h','file-535b80706e9ed74937e8af1a',NULL,0,'cancelled',1003611.0,1090011.0,'file-a2969382964ec9f0ce2dcf77','file-7b4d17e68a3c95165c00cee8',NULL,'fake','{"validating": 1003611.0, "in_progress": 1003611.0, "cancelling": 1003616.0, "cancelled": 1003616.0}',NULL,'[1, 4, 5, {"computed": 1, "reused": 0, "prompt_tokens": 4, "cached_tokens": 0, "completion_tokens": 4, "engine_s": 0.008738582999967548}]');
INSERT INTO "batches" VALUES(4,'batch_830694dab3f895ee','adam','/v1/completions','24h','file-d95ae94f3e23f3364cac6660',NULL,0,'failed',1003616.0,1090016.0,'file-bdd8101db817bb18c33c18af','file-db0ca2db377a243e4c6f0f7e',NULL,NULL,'{"failed": 1003616.0}','[["duplicate_custom_id", "custom_id ''a'' is on line 1 and again on line 2", 2, "custom_id"]]',NULL);
INSERT INTO "batches" VALUES(5,'batch_dd8391dc58f4c976','eva','/v1/completions','24h','file-fa64c5d52a64a20a45312390','{"night": "two", "key": "1"}',0,'in_progress',1003628.0,1090028.0,'file-40b6286bb68dba149a68dcdb','file-a694985902f804db06239be4',NULL,'fake','{"validating": 1003628.0, "in_progress": 1003628.0}',NULL,NULL);
INSERT INTO "batches" VALUES(6,'batch_a75e9e0b0d6856ed','adam','/v1/completions','24h','file-e24021346e4c45682edc1a75',NULL,0,'cancelling',1003628.0,1090028.0,'file-2a5adc03a7b8ee1cfef82141','file-b36de13c29b38227d3afdd08',NULL,'fake','{"validating": 1003628.0, "in_progress": 1003628.0, "cancelling": 1003639.0}',NULL,NULL);
INSERT INTO "batches" VALUES(7,'batch_d08ddb955c9693df','eva','/v1/completions','24h','file-53d185f46313c2b943034787',NULL,0,'finalizing',1003628.0,1090028.0,'file-5d72e353a8f5291d01f37a0c','file-c97ffafa3184bd54a488637c',NULL,'fake','{"validating": 1003628.0, "in_progress": 1003628.0, "finalizing": 1003628.0}',NULL,NULL);
INSERT INTO "batches" VALUES(8,'batch_90bd7f327c644c7a','adam','/v1/completions','24h','file-45298048a05c7bb3ecdf672d',NULL,0,'validating',1003639.0,1090039.0,'file-6ad345ee981b0f4f60582c10','file-5d0abe79c72c51723b0d2970',NULL,NULL,'{}',NULL,NULL);
CREATE TABLE files (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    id        TEXT NOT NULL UNIQUE,
    owner     TEXT,                        -- a key's name; NULL: whoever came without one
    filename  TEXT NOT NULL,               -- as the client calls it: for people only
    purpose   TEXT NOT NULL,
    bytes     INTEGER NOT NULL,
    sha256    TEXT NOT NULL,
    created_s REAL NOT NULL,
    expires_s REAL
);
INSERT INTO "files" VALUES(1,'file-bc61722e93c25a6111fce6f4','eva','jobs.jsonl','batch',334,'4407bc118ce3c7327af22ec31c6c14756ad01e17716ffc3686bb821833183d3c',1000000.0,NULL);
INSERT INTO "files" VALUES(2,'file-6ab9b888bc1389b300fa3c59','eva','batch_b1c6981b754b5d2d_output.jsonl','batch_output',965,'3a67061c4daa80ffdfbc2fe76d2fe42d727ce18a5cb817592ad07c8328632544',1000000.0,1007200.0);
INSERT INTO "files" VALUES(3,'file-215ec7015d4e730c69dcdb8c','eva','batch_b1c6981b754b5d2d_error.jsonl','batch_output',189,'2f46d0e4444444a8d32018fdce4208e672719f162f68609a50ac60aab4f569a0',1000000.0,1007200.0);
INSERT INTO "files" VALUES(4,'file-9f5d89cba69557e0c2d43da9','eva','jobs.jsonl','batch',567,'623471711ce87be3b0a0681cdd907a89734fe8c764f6152a67979d1e57781a05',1000010.0,NULL);
INSERT INTO "files" VALUES(5,'file-48f107b8173c35c38931bd5b','eva','batch_27561a4ca69ff0aa_output.jsonl','batch_output',483,'9ae6e434847f739a59f908c1b76eb70986b4da2a0ed391279f6956e81b95feb2',1003611.0,NULL);
INSERT INTO "files" VALUES(6,'file-8f084f5f9e9135177c24d4e8','eva','batch_27561a4ca69ff0aa_error.jsonl','batch_output',792,'4b96531a784a1c540147f363744a2515e046f73412df737f52f9d3392eef6073',1003611.0,NULL);
INSERT INTO "files" VALUES(7,'file-535b80706e9ed74937e8af1a','adam','jobs.jsonl','batch',570,'076773424cc6658d7fb75aec3a670c171d79e34d3ed2cc9fccabe103ba17ac7f',1003611.0,NULL);
INSERT INTO "files" VALUES(8,'file-a2969382964ec9f0ce2dcf77','adam','batch_7d5c9142f29a7821_output.jsonl','batch_output',482,'70a678be883aea7177a2df6acdbc497971810e2a1c902b6f224aba66787e0845',1003616.0,NULL);
INSERT INTO "files" VALUES(9,'file-7b4d17e68a3c95165c00cee8','adam','batch_7d5c9142f29a7821_error.jsonl','batch_output',740,'0834f6238c08c23033db60aca2286d75e020ff38a648929f778b2b2ad1b0f245',1003616.0,NULL);
INSERT INTO "files" VALUES(10,'file-d95ae94f3e23f3364cac6660','adam','jobs.jsonl','batch',209,'4cc27cab359dfee2e916a5f43f6b638b5feb99b92df47711ef9c470557dee7f5',1003616.0,NULL);
INSERT INTO "files" VALUES(11,'file-1aa08c81818abb75d638b0ec','eva','notes.txt','user_data',12,'796a50e8ebb34197d000bd7971020b4ba707a8624206639e260f9048ea6b8bee',1003621.0,3595621.0);
INSERT INTO "files" VALUES(12,'file-fa64c5d52a64a20a45312390','eva','jobs.jsonl','batch',347,'0e65d194da3dbc5261459112cfca97c7eacee4bad37e023dfe5df1ccb19976d3',1003628.0,NULL);
INSERT INTO "files" VALUES(13,'file-e24021346e4c45682edc1a75','adam','jobs.jsonl','batch',236,'f6191fd11b211d1f2270e9c74e0439cf64baac07982ecee51aaa819b29e903c7',1003628.0,NULL);
INSERT INTO "files" VALUES(14,'file-53d185f46313c2b943034787','eva','jobs.jsonl','batch',381,'6d90dcc4ea16423ef557f6887fd41015eb9bb476d41d41a718376719fb5fb41c',1003628.0,NULL);
INSERT INTO "files" VALUES(15,'file-5d72e353a8f5291d01f37a0c','eva','batch_d08ddb955c9693df_output.jsonl','batch_output',965,'30ccbdf3e45333502a5d8aa60c2443cc160f80b24c30548d597db6ae5f95973b',1003628.0,NULL);
INSERT INTO "files" VALUES(16,'file-c97ffafa3184bd54a488637c','eva','batch_d08ddb955c9693df_error.jsonl','batch_output',189,'440b889da3fd3b7dcf2db20ac7a25b34cb18d1e263cada73b937d95d13b8e17e',1003628.0,NULL);
INSERT INTO "files" VALUES(17,'file-45298048a05c7bb3ecdf672d','adam','jobs.jsonl','batch',219,'eb7c96e48c7d53ff57c7d01345067d003580e9cf83c24b7099d903c2814e6d8c',1003639.0,NULL);
CREATE INDEX batches_open ON batches (seq) WHERE status NOT IN ('failed', 'completed', 'expired', 'cancelled');
CREATE INDEX batches_input ON batches (input_file_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('files',17);
INSERT INTO "sqlite_sequence" VALUES('batches',8);
COMMIT;
