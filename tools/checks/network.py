"""The checks of tools/doctor.py against strangers: the secret that ranks share, and the one port
that the toolkit doesn't open itself.
"""

import os
import socket

from errors import InputError
from launch import secret, store
from launch.rendezvous import addresses


def common_secret() -> tuple[bool, str]:
    """Checks the secret by which ranks know one another."""
    try:
        # It tells two secrets apart, and reveals nothing else of them.
        mark = secret.mac(secret.shared_secret(), b"doctor").hex()[:8]
    except InputError as error:
        return False, str(error)
    where = secret.SECRET_VARIABLE
    if not os.environ.get(where):
        where = str(secret.secret_file())
    return True, f"{where}, mark {mark}: the same on all machines of a run"


def can_fence() -> tuple[bool, str]:
    """Checks that Paddle's store, which listens at all addresses, can be shut once all ranks are
    connected.
    """
    with socket.create_server(("", 0)) as listener:
        found = listener.getsockname()[1]
        open_at = [address for address in addresses().values() if _connects(address, found)]
        shut = store.shut(listener)
        still = [address for address in addresses().values() if _connects(address, found)]
    far = (
        ", ".join(address for address in open_at if not address.startswith("127."))
        or "no address but loopback"
    )
    if not shut or still:
        reason = "this kernel filters no sockets: Paddle's store answers anybody for the whole run"
        return (
            False,
            f"{reason} (at {far}); let a firewall pass the run's machines alone (docs/reliability.md, The network)",
        )
    return (
        True,
        f"Paddle's store listens at {far} until all ranks are connected, then nobody else connects",
    )


def _connects(address: str, number: int) -> bool:
    try:
        socket.create_connection((address, number), 0.2).close()
    except OSError:
        return False
    return True
