"""Children that kill themselves at a boundary of their writes; imports nothing but Python's own."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

WAIT_S = 60.0


class Bomb:
    """Counts boundaries while it is armed, and ends the process at one of them."""

    def __init__(self, fuse: int | None) -> None:
        self.fuse = fuse
        self.count = 0
        self.armed = False
        self._lock = threading.Lock()

    def tick(self) -> None:
        with self._lock:
            if not self.armed:
                return
            if self.count == self.fuse:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(WAIT_S)
            self.count += 1


def fork(work: Callable[[], None]) -> int:
    """Do something in a child and return its id; a fault there is told and is exit code 1."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  (nothing may leave a forked child)
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return child


def was_killed(child: int) -> bool:
    """Wait for a child's end.

    Raises:
        AssertionError: It found something wrong, or ended in another way.
    """
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {0, -signal.SIGKILL}, f"the child ended with {status}"
    return status < 0
