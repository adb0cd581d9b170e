"""The toolkit's programs, from any folder:

    paddle-vit train ...      as sh run_train_multi.sh ...
    paddle-vit eval ...       as sh run_eval_multi.sh ...
    paddle-vit ops            compiles the operators for CPUs, as python -m ops.build
    paddle-vit predict ...    as python tools/predict.py ...; the other tools likewise

With -h, train, eval and the tools list their own flags. ``paddle-vit --version`` prints the
toolkit's version.
"""

import os
import sys

from paddle_vit_toolkit import ROOT

_MAIN = [str(ROOT / "main_multi_gpu.py"), "-default_cfg=vit_digits"]
_OPS = f"import runpy, sys; sys.path[0] = {str(ROOT)!r}; runpy.run_module('ops.build', run_name='__main__')"


def main() -> None:
    """Runs one of them in the place of this process: signals, processes and errors are the
    program's own.
    """
    programs = {file.stem: [str(file)] for file in sorted((ROOT / "tools").glob("*.py"))}
    programs |= {"train": _MAIN, "eval": [*_MAIN, "-eval"], "ops": ["-c", _OPS]}
    name = sys.argv[1] if len(sys.argv) > 1 else "-h"
    if name in ("-h", "--help"):
        print(f"{__doc__}\nTools: {', '.join(sorted(programs.keys() - {'train', 'eval', 'ops'}))}")
    elif name in ("-version", "--version"):
        from paddle_vit_toolkit import __version__

        print(f"paddle-vit-toolkit {__version__}")
    elif name in programs:
        os.execv(sys.executable, [sys.executable, *programs[name], *sys.argv[2:]])
    else:
        print(
            f"error: paddle-vit has no command {ascii(name)[:80]}; paddle-vit -h lists them",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
