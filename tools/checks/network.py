"""The checks of tools/doctor.py that concern security: the secret that ranks share, and the port
that Paddle opens.
"""

import os
import socket

from errors import InputError
from launch import secret, store
from launch.rendezvous import addresses


def common_secret() -> tuple[bool, str]:
    """Checks the secret by which ranks recognise one another."""
    try:
        # Equal marks mean equal secrets. Nothing else follows from a mark.
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
        port = listener.getsockname()[1]
        open_before = [address for address in addresses().values() if _connects(address, port)]
        is_shut = store.shut(listener)
        open_after = [address for address in addresses().values() if _connects(address, port)]
    reachable = [address for address in open_before if not address.startswith("127.")]
    where = ", ".join(reachable) or "no address other than loopback"
    if not is_shut or open_after:
        reason = "this kernel doesn't filter sockets: Paddle's store accepts anybody during the whole run"
        advice = "restrict access to the machines of the run by a firewall (docs/evidence/guarantees.md, The network)"
        return False, f"{reason} (at {where}); {advice}"
    until = "until all ranks are connected; then nobody else can connect"
    return True, f"Paddle's store listens at {where} {until}"


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), 0.2).close()
    except OSError:
        return False
    return True
