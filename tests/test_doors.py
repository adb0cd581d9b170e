"""What writes or removes does so through the door (launch/files.py), or is listed here with the
reason.
"""

import ast
import re

import pytest
from support.imports import HOUSE, imported, tree_of

DOOR = "launch/files.py"
WRITING_FLAGS = {"os.O_WRONLY", "os.O_RDWR", "os.O_CREAT", "os.O_APPEND", "os.O_TRUNC"}
# Calls by their whole name, and methods by their last one.
WRITERS = {
    "os.mkfifo", "os.symlink", "os.link", "os.truncate", "shutil.copy", "shutil.copy2", "shutil.copyfile",
    "shutil.copytree", "shutil.move", "np.save", "np.savez", "np.savez_compressed", "np.savetxt", "plt.savefig",
    "paddle.save", "paddle.jit.save", "logging.FileHandler",
}  # fmt: skip
WRITING_METHODS = {
    "write_text",
    "write_bytes",
    "touch",
    "symlink_to",
    "hardlink_to",
    "savefig",
    "save",
    "save_file",
}
REMOVERS = {
    "shutil.rmtree", "os.unlink", "os.remove", "os.rmdir", "os.removedirs", "os.rename", "os.renames", "os.replace",
}  # fmt: skip
REMOVING_METHODS = {"unlink", "rmdir", "rename"}

OWN_FOLDER = "in a folder that this process has just made"
NO_FILE = "no file that has a name"
DOORS = "a descriptor that the door gave"
WRITTEN = {
    "examples/scikit_image_masks.py: main": OWN_FOLDER,
    "inference/prediction_writers.py: standard_output": NO_FILE,
    "inference/captions.py: save": "opened with mode x",
    "inference/captions.py: write": OWN_FOLDER,
    "inference/conventions.py: write_conventions": OWN_FOLDER,
    "inference/text/exporting.py: write_text_export": OWN_FOLDER,
    "inference/text/tokenizing_process.py: _main": NO_FILE,
    "inference/serve/compute.py: _silence_libraries": "the null device, and a copy of standard error",
    "inference/exporting.py: _write_for_client": OWN_FOLDER,
    "inference/exporting.py: _write_graphs": OWN_FOLDER,
    "inference/exporting.py: write_export": OWN_FOLDER,
    "inference/exporting.py: _write_graph_of_maps": OWN_FOLDER,
    "inference/formats.py: openvino_of": OWN_FOLDER,
    "inference/map_pictures.py: _save": OWN_FOLDER,
    "inference/paddlex.py: write_settings": OWN_FOLDER,
    "launch/signals.py: die_with_parent": "this process's own entry of /proc",
    "launch/spawned.py: __init__": NO_FILE,
    "launch/streams.py: _non_blocking": "this process's own standard stream",
    "launch/streams.py: keep": "/dev/null",
    "loading/transforms/isolated_process.py: _main": NO_FILE,
    "models/paddle_inference.py: quiet": "/dev/null",
    "models/paddle_inference.py: save_program": OWN_FOLDER,
    "ops/build.py: compile_operators": OWN_FOLDER,
    "tools/make_shapes.py: write": OWN_FOLDER,
    "tools/make_shards.py: make_shards": OWN_FOLDER,
    "tools/make_shards.py: pack": OWN_FOLDER,
    "tools/package/build_command.py: _write_stub": OWN_FOLDER,
    "tools/package/docs_site.py: on_post_build": "in the folder of the site that was just built",
    "tools/predict.py: writing": "opened with mode x (inference/captions.py)",
    "training/checkpoint/kept.py: _link": "second names, in a folder that this process has just made",
    "training/checkpoint/storage.py: replace_link": "a link, by a name that can't be guessed",
    "training/live_report.py: renew": NO_FILE,
    "training/requests.py: _save": "the saver's method",
    "training/run.py: _append": "the end of a file that the door opened",
    "training/run.py: _sign": DOORS,
    "training/shared_gradients.py: _shared_memory": NO_FILE,
    "training/sweeps/results.py: lock": DOORS,
    "training/tracking.py: main": DOORS,
}
REMOVED = {
    "inference/prediction_writers.py: move_into_place": "what is whole gets the name that the user gave",
    "launch/secret.py: _make": "the file that it has just made",
    "loading/cache.py: _remove": "empty folders that it has just made",
    "tools/package/build_command.py: run": "setuptools' own folder for a build",
    "tools/robustness.py: main": "the file that it has just made, and its folder if that is empty",
    "training/checkpoint/kept.py: _remove": "the folder of a step, if checkpoints were all it held",
    "training/checkpoint/kept.py: remove_kept": "the folder around them, if that is empty",
    "training/checkpoint/storage.py: _take_sum": "a checksum that another rank has just written for this one",
    "training/checkpoint/storage.py: write_checkpoint": "its own files, which an earlier try has left in a moved folder",
    "training/checkpoint/storage.py: write_share": "the same, of another rank",
    "training/checkpoint/saver.py: _begin_checkpoint": "empty folders that it has just made",
    "training/checkpoint/storage.py: replace_link": "a link takes the place of a link",
    "training/checkpoint/storage.py: _empty": "a folder that holds nothing but a checkpoint's files",
    "training/checkpoint/storage.py: remove_checkpoint": "the same, before",
    "training/checkpoint/storage.py: remove_leftovers": "a link with the name of one that a killed run had begun",
    "training/checkpoint/resume.py: _rewind_checkpoints": "a damaged checkpoint gets another name; links of the run's own",
    "training/run.py: _cannot_lock": "the folder that it has just made, if that is empty",
}


def is_writing_open(call):
    """Whether a call of ``open`` may write to a file that is there already: mode "x" can't, through
    no link either.
    """
    mode = (
        call.args[1]
        if len(call.args) > 1
        else next((k.value for k in call.keywords if k.arg == "mode"), None)
    )
    if mode is None:
        return False
    return not isinstance(mode, ast.Constant) or bool(re.search("[wa+]", str(mode.value)))


def is_through_the_door(call):
    """Whether ``open`` gets a descriptor of the door's, or a library writes into a file that is
    open already.
    """
    first = ast.unparse(call.args[0]) if call.args else ""
    of_a_library = not ast.unparse(call.func).startswith(("os.", "shutil."))
    return first.startswith("open_lock(") or (of_a_library and first in ("file", "buffer"))


def kinds(call):
    """Yields "writes" and "removes" where a call does."""
    name = ast.unparse(call.func)
    text = ast.unparse(call)
    method = name.rpartition(".")[2]
    writes = name in WRITERS or (isinstance(call.func, ast.Attribute) and method in WRITING_METHODS)
    writes = writes or (
        name in ("open", "os.fdopen", "io.open", "Path.open") and is_writing_open(call)
    )
    writes = writes or (
        name == "os.open"
        and any(flag in text for flag in WRITING_FLAGS)
        and "os.O_EXCL" not in text
    )
    if writes and not is_through_the_door(call):
        yield "writes"
    if name in REMOVERS or (isinstance(call.func, ast.Attribute) and method in REMOVING_METHODS):
        yield "removes"


def found(node, kind, function=""):
    """Yields the functions with such a call."""
    if isinstance(node, ast.FunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and kind in kinds(node):
        yield function
    for child in ast.iter_child_nodes(node):
        yield from found(child, kind, function)


@pytest.mark.parametrize(("kind", "listed"), [("writes", WRITTEN), ("removes", REMOVED)])
def test_files_are_written_and_removed_through_the_door(kind, listed):
    shipped = sorted(
        name for name in HOUSE if name != DOOR and not name.startswith("tools/benchmarks/")
    )
    assert {
        f"{name}: {function}" for name in shipped for function in found(tree_of(name), kind)
    } == listed.keys()


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "open(path, 'r+')",
        "open(path, mode)",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "Path(path).write_text('')",
        "figure.savefig(path)",
        "np.savez(path, **arrays)",
        "logging.FileHandler(path)",
    ],
)
def test_a_writer_outside_of_the_door_is_seen(line):
    assert list(found(ast.parse(f"def f():\n    {line}"), "writes")) == ["f"]


def test_a_reader_is_no_writer():
    for line in (
        "open(path)",
        "open(path, 'rb')",
        "open(path, 'xb')",
        "os.open(path, os.O_RDONLY)",
        "save(path)",
    ):
        assert not list(found(ast.parse(line), "writes"))


def test_matplotlib_is_imported_without_the_settings_of_the_current_folder():
    plain = "training.pages.plain_matplotlib"
    importers = {
        name
        for name in HOUSE
        if any(one.partition(".")[0] == "matplotlib" for one in imported(tree_of(name)))
    }
    assert len(importers) > 3
    for name in importers - {f"{plain.replace('.', '/')}.py"}:
        first = next(one for one in imported(tree_of(name)) if "matplotlib" in one)
        assert first == plain, name
