"""Shows the runs of a folder in a browser: their states, and their curves side by side.

    python tools/watch.py ./output [-port 8001]

SAVE is a folder of runs, or one run. The page at the printed address renews itself. It lists each
run with its state, epoch, best accuracy, learning rate and speed, draws the curves of those that are
chosen, and leads to their report.html. Nothing in the folder is changed. Only programs of this
machine reach the page, unless -host is set. Ctrl-C ends it.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run by its path, Python would look in tools/ alone

import launch.startup  # noqa: E402, F401  (signals and streams)
from errors import InputError, reporting  # noqa: E402
from settings.parser import Parser  # noqa: E402


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("save", type=Path, metavar="SAVE", help="a folder of runs, or one run")
    parser.add_argument(
        "-host",
        "--host",
        default="127.0.0.1",
        metavar="HOST",
        help="address to listen on; 0.0.0.0: all (%(default)s)",
    )
    parser.add_argument(
        "-port",
        "--port",
        type=int,
        default=8001,
        metavar="PORT",
        help="port; 0: a free one (%(default)s)",
    )
    options = parser.parse_args()
    if not options.save.is_dir():
        raise InputError(f"{options.save} isn't a folder; name a folder of runs, such as ./output")
    if not 0 <= options.port < 1 << 16:
        raise InputError(f"-port is {options.port}, expected 0 to 65535 (0: any that is free)")
    from inference.watch.server import Server

    server = Server(options.save, options.host, options.port)
    print(f"the runs of {options.save} are at {server.url}", flush=True)
    if not server.private:
        print(f"warning: anyone who reaches {server.url} can see them", file=sys.stderr, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    with reporting():
        main()
