"""Writes notes.jsonl: one OpenAI batch line for each note of the log.

    python make_jobs.py > notes.jsonl

The handbook is the system message and the examples follow it, the same bytes in every line: that is what makes them a
head that is computed once. What differs from line to line, the note, comes last.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent


def paragraphs(name: str) -> list[str]:
    """The paragraphs of a file."""
    return (HERE / name).read_text(encoding="utf-8").strip().split("\n\n")


def main() -> None:
    """Print the lines."""
    head = [{"role": "system", "content": (HERE / "handbook.md").read_text(encoding="utf-8").strip()}]
    for example in paragraphs("examples.txt"):
        note, headline = example.split("\n> ")
        head += [{"role": "user", "content": note}, {"role": "assistant", "content": headline}]
    for number, note in enumerate(paragraphs("notes.txt"), 1):
        messages = [*head, {"role": "user", "content": note}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 24, "stop": [".", "\n"]}
        line = {"custom_id": f"note-{number:02}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    main()
