"""Ends a build whose process was killed. `builds.py` runs this file by its path, so it imports nothing of the package.

The folder is the one that has the given path at the beginning, and no link: whatever has that path later is left alone.

It waits for its input. If that ends and nothing was written there, the process that built is gone: then everything that works in the folder, ninja and
compilers, is ended, and the folder removed.
"""

import os
import shutil
import signal
import sys
import time


def workers(folder: os.stat_result) -> list[int]:
    """The processes that work in one of a folder's folders: ninja starts all its compilers where it was started itself."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.path.samestat(os.stat(f"/proc/{name}/cwd/.."), folder):
                found.append(int(name))
        except OSError:  # it ended, or is another user's
            pass
    return found


def main() -> None:
    path = sys.argv[1]
    # It stays open, so that no other folder gets its inode.
    folder = os.fstat(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
    if folder.st_uid != os.geteuid():
        return
    # One character: a process forked meanwhile may hold the other end open.
    if sys.stdin.read(1):
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
    try:
        if os.path.samestat(os.lstat(path), folder):
            shutil.rmtree(path, ignore_errors=True)
    except OSError:  # it is gone
        pass


if __name__ == "__main__":
    main()
