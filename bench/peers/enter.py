"""Runs a command as a host: in its network, and under its name.

    python enter.py host1 COMMAND ARGS...

``host1`` is entered from another host of the same cluster, or is the one that this runs on. The
name matters to MPI, which takes ranks under one name to share memory. As the agent of mpirun in
place of ssh, the command is one for a shell.
"""

import os
import socket
import subprocess
import sys


def own_namespace() -> str:
    """Returns the name of the network namespace that this runs in; empty outside of any."""
    command = ["ip", "netns", "identify", str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Becomes the command."""
    host, *command = sys.argv[1:]
    own = own_namespace()
    namespace = own.rpartition("-")[0] + "-h" + host.removeprefix("host")
    os.unshare(os.CLONE_NEWUTS)
    socket.sethostname(host)
    enter = [] if namespace == own else ["ip", "netns", "exec", namespace]
    words = [*enter, "sh", "-c", " ".join(command)]
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
