"""Writes notes.jsonl: one OpenAI batch line for each note, the handbook in front of all of them.

    python make_jobs.py > notes.jsonl

The handbook is the system message, the same bytes in every line: that is what makes it a head that is computed once.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
PARTS = ["power", "cooling", "storage", "network", "compute", "building"]
URGENCIES = ["now", "today", "week", "none"]
SCHEMA = {
    "type": "object",
    "properties": {
        "part": {"type": "string", "enum": PARTS},
        "urgency": {"type": "string", "enum": URGENCIES},
        "summary": {"type": "string", "maxLength": 120},
    },
    "required": ["part", "urgency", "summary"],
    "additionalProperties": False,
}


def main() -> None:
    """Print the lines."""
    handbook = (HERE / "handbook.md").read_text(encoding="utf-8")
    notes = (HERE / "notes.txt").read_text(encoding="utf-8").strip().split("\n\n")
    for number, note in enumerate(notes, 1):
        body = {
            "messages": [{"role": "system", "content": handbook}, {"role": "user", "content": note}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "filed", "schema": SCHEMA}},
            "temperature": 0,
            "max_tokens": 80,
        }
        line = {"custom_id": f"note-{number:02}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
