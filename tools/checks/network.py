"""What tools/doctor.py looks at of strangers: the secret that ranks hold, and the one port that
isn't the toolkit's.
"""

import os
import socket

from errors import InputError
from launch import fence, secret
from launch.rendezvous import addresses


def common_secret() -> tuple[bool, str]:
    """What ranks prove to one another that they hold."""
    try:
        # tells two apart, and no more
        mark = secret.mac(secret.shared_secret(), b"doctor").hex()[:8]
    except InputError as error:
        return False, str(error)
    where = secret.VARIABLE if os.environ.get(secret.VARIABLE) else secret.file()
    return True, f"{where}, mark {mark}: the same on all machines of a run"


def can_fence() -> tuple[bool, str]:
    """Whether Paddle's store, which listens on all addresses, can be shut once all ranks are
    connected.
    """
    with socket.create_server(("", 0)) as listener:
        found = listener.getsockname()[1]
        open_at = [address for address in addresses().values() if _connects(address, found)]
        shut = fence.shut(listener)
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
