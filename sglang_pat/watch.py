"""Ends a build whose process was killed. `jit.py` runs this file by its path, so it imports nothing of the package.

It waits for the end of its input. If nothing was written there, the process that built is gone: then everything that works in the folder, ninja and
compilers, is ended, and the folder removed.
"""

import os
import shutil
import signal
import sys
import time


def workers(folder: str) -> list[int]:
    """The processes whose working directory is a folder: ninja starts all its compilers where it was started itself."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/cwd") == folder:
                found.append(int(name))
        except OSError:  # it ended, or is another user's
            pass
    return found


def main() -> None:
    folder = os.path.realpath(sys.argv[1])
    if sys.stdin.read():
        return
    # Some may start others before they end, so look again; a process that waits for a broken disk does not end at all.
    for _ in range(100):
        running = workers(folder)
        if not running:
            break
        for worker in running:
            try:
                os.kill(worker, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
