"""An engine that says what is left of a former one's sessions, then saves new ones until it ends.

Called with the folder, the model file, the collection to look at, that to fill, and the number of
the write at which it kills itself (0: never). One line a document, then `saving`, one line a
document that is written, `saved`; then it waits to be killed, or for the end of its input, after
which it says how many writes there were.
"""

import json
import random
import sys
from pathlib import Path

from tests.engine.restarted import LENGTHS, KillingDisk, ask, engine_on, told


def main() -> None:
    path, model, former, new, kill_at = sys.argv[1:]
    with engine_on(Path(model), Path(path)) as (engine, archive):
        assert archive is not None
        for number in range(len(LENGTHS)):
            print(json.dumps(told(engine, number, namespace=former)), flush=True)
        archive.flush()
        disk = archive._folder._disk
        assert isinstance(disk, KillingDisk)
        disk.arm(int(kill_at))
        print("saving", flush=True)
        chance = random.Random(new)
        for number in chance.sample(range(len(LENGTHS)), len(LENGTHS)):
            ask(engine, number, "What?", namespace=new, max_tokens=1)
            if chance.random() < 0.5:
                archive.flush()
                print(number, flush=True)
        archive.flush()
        print("saved", flush=True)
        sys.stdin.read()
        print(int(kill_at) - disk.left, flush=True)


if __name__ == "__main__":
    main()
