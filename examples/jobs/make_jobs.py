"""Writes notes.jsonl: one OpenAI batch line for each note of the log.

    python make_jobs.py > notes.jsonl

Every line begins with the same bytes, the handbook as system message and the examples, so this prefix is computed once.
The note, which differs, comes last.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent


def paragraphs(name: str) -> list[str]:
    """The paragraphs of a file."""
    return (HERE / name).read_text(encoding="utf-8").strip().split("\n\n")


def main() -> None:
    """Print the lines."""
    prefix = [{"role": "system", "content": (HERE / "handbook.md").read_text(encoding="utf-8").strip()}]
    for example in paragraphs("examples.txt"):
        note, headline = example.split("\n> ")
        prefix += [{"role": "user", "content": note}, {"role": "assistant", "content": headline}]
    for number, note in enumerate(paragraphs("notes.txt"), 1):
        messages = [*prefix, {"role": "user", "content": note}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 24, "stop": [".", "\n"]}
        line = {"custom_id": f"note-{number:02}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
