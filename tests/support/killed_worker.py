"""Runs a batch until it is killed: submits, starts, commits, writes the output, and prints what it acknowledged.

    killed_worker.py FOLDER

Each line on stdout is an acknowledgement: a job's number and the checksum of its answer; or the current step:
`opening`, `stored`, `sealed`, `finished`. After `stored`, it continues when it reads a line.
"""

import hashlib
import json
import random
import sys
from pathlib import Path

from tokenmill.jobs.ingest import submit as submitting
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import FinishedJob, Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.store import Store
from tokenmill.storage import lines
from tokenmill.units import KIB


def main() -> None:
    folder = Path(sys.argv[1])
    submitting.GROUP_LINES, lines.BLOCK_BYTES = 100, 16 * KIB  # so that a kill finds a submit half done
    print("opening", flush=True)
    with Store(folder / "store") as store:
        how = Submission("m", output=str(folder / "out.jsonl"))
        batch = submit(store, folder / "jobs.jsonl", how, processes=0, progress=_stored).batch
        print("sealed", flush=True)
        with Output(store, batch) as output:
            while waiting := store.waiting([batch.id], limit=random.randint(1, 12)):
                started = store.start([item.id for item in waiting])
                answers = [FinishedJob(job.id, body(job.number)) for job in started.running]
                store.commit(answers)
                for answer in answers:
                    print(answer.job, hashlib.sha256(answer.body).hexdigest(), flush=True)
                output.advance()
            assert output.finish()
    print("finished", flush=True)


def _stored(line: int) -> None:
    print("stored", flush=True)
    sys.stdin.readline()


def body(number: int) -> bytes:
    """Another one each time it is computed: an answer that changed would show."""
    return json.dumps({"number": number, "drawn": random.random(), "text": "x" * random.randint(0, 3000)}).encode()


if __name__ == "__main__":
    main()
