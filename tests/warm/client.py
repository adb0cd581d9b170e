import array
import os
import signal
import socket
import sys

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)


def opened():
    """Returns the descriptors that this process was started with."""
    descriptors = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(descriptor)
        except OSError:
            # This one listed the folder, and is closed.
            continue
        descriptors.append(descriptor)
    return descriptors


def main():
    descriptors = opened()
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # The copy that runs begins with ADDRESS and PYTHON (__init__.py).
        server.connect(ADDRESS)  # noqa: F821
        handed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        server.sendmsg([" ".join(map(str, descriptors)).encode()], handed)
        answer = server.recv(32)
    except OSError:
        answer = b""
    if not answer:
        # There is no server, or its fork couldn't behave as a real start would.
        server.close()
        os.execv(PYTHON, [PYTHON, *sys.argv[1:]])  # noqa: F821
    program = int(answer)
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: os.kill(program, number))
    # The program has copies. Whoever reads a pipe of it shall see the end when the program closes
    # it.
    for descriptor in descriptors:
        os.close(descriptor)
    status = int(server.recv(32) or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
