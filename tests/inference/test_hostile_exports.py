"""An export whose graph gives no logits is one line as it is loaded; one that never ends is
stopped.
"""

import asyncio
import fcntl
import signal
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import warm
from paddle import nn
from support import exports, photographs
from support.exports import exported, replace_file
from support.programs import ROOT
from support.servers import wait_until

from errors import InputError, RunError
from inference import Predictor
from inference.backends import open_export
from inference.exporting import write_export
from inference.feature_store import FeatureExtractor
from inference.serve import workers
from inference.serve.settings import Settings

onnx = pytest.importorskip("onnx", reason="the extra export isn't installed")
temporary = exports.temporary
weights = exports.weights
IMAGES = "float[batch, 3, 32, 32] images"
LOGITS = "float[batch, 5] logits"
ANY = "float[rows, columns] out"


@pytest.fixture(scope="module")
def folders(weights, tmp_path_factory):
    """Exports of a model of 5 classes, by format; a test puts another graph in."""
    root = tmp_path_factory.mktemp("exports")
    for kind in ("paddle", "onnx", "openvino"):
        exported(weights, root / kind, kind)
    return root


def onnx_graph(output, body, inputs=IMAGES):
    """The bytes of a graph whose ``x`` is [batch, 5], the mean of each image."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> graph ({inputs}) => ({output}) {{
        flat = Flatten(images)
        mean = ReduceMean<axes = [1]>(flat)
        x = Concat<axis = 1>(mean, mean, mean, mean, mean)
        {body}
    }}"""
    return onnx.parser.parse_model(text).SerializeToString()


def constant(name, *values):
    return f"{name} = Constant<value = int64[{len(values)}] {{{', '.join(map(str, values))}}}>()"


SHAPES = {
    "map": (ANY, f"one = ReduceMean(x) {constant('s', 1, 1, 8, 8)} out = Expand(one, s)", "float32 [1, 1, 8, 8]"),
    "scalar": (ANY, "out = ReduceMean<keepdims = 0>(x)", "float32 []"),
    "seven rows": (ANY, f"{constant('s', 7, 1)} out = Tile(x, s)", "float32 [14, 5]"),
    "a million": (ANY, f"{constant('s', 1, 200000)} out = Tile(x, s)", "float32 [2, 1000000]"),
    "transposed": (ANY, "out = Transpose(x)", "float32 [5, 2]"),
    "one row": (ANY, "out = ReduceMean<axes = [0]>(x)", "float32 [1, 5]"),
    "none": (ANY, f"{constant('s', 0, 5)} {constant('t', 0)} {constant('u', 1)} out = Slice(x, t, t, t, u)",
             "float32 [0, 5]"),
    "int64": ("int64[a, b] out", "out = Cast<to = 7>(x)", "int64 [2, 5]"),
    "bool": ("bool[a, b] out", "out = Cast<to = 9>(x)", "bool [2, 5]"),
    "float64": ("double[a, b] out", "out = Cast<to = 11>(x)", "float64 [2, 5]"),
    "float16": ("float16[a, b] out", "out = Cast<to = 10>(x)", "float16 [2, 5]"),
    "text": ("string[a, b] out", "out = Cast<to = 8>(x)", "object [2, 5]"),
    "a list": ("seq(float[a, b]) out", "out = SequenceConstruct(x)", "list"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_an_output_that_isnt_logits_is_a_line_at_the_load(name, folders):
    output, body, found = SHAPES[name]
    replace_file(folders / "onnx", "model.onnx", onnx_graph(output, body))
    with pytest.raises(InputError) as caught:
        open_export(folders / "onnx")
    told = f"its graph gives {found} for 2 images of 5 classes, expected float32 [2, 5]"
    assert (
        str(caught.value)
        == f"{folders}/onnx: {told}; export the model again (tools/export_model.py)"
    )


@pytest.mark.parametrize(
    ("inputs", "output", "counts"),
    [
        (f"{IMAGES}, float[1] more", LOGITS, "its graph's inputs are 2 and its outputs 1"),
        (IMAGES, f"{LOGITS}, float[a, b] mean", "its graph's inputs are 1 and its outputs 2"),
    ],
)
def test_more_inputs_or_outputs_are_a_line(inputs, output, counts, folders):
    body = "logits = Add(x, more)" if "more" in inputs else "logits = Identity(x)"
    replace_file(folders / "onnx", "model.onnx", onnx_graph(output, body, inputs))
    with pytest.raises(InputError, match=f"{counts}, expected one of each; export"):
        open_export(folders / "onnx")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_graph_of_one_batch_size_is_a_line(size, folders):
    graph = onnx_graph(
        f"float[{size}, 5] logits", "logits = Identity(x)", IMAGES.replace("batch", str(size))
    )
    replace_file(folders / "onnx", "model.onnx", graph)
    with pytest.raises(
        InputError, match=r"onnx: can't be read as an export of format onnx \(InvalidArgument"
    ) as caught:
        # of two images it is known then
        open_export(folders / "onnx")(np.zeros((4, 3, 32, 32), np.float32))
    assert "\n" not in str(caught.value)


def test_what_a_later_batch_gives_is_checked_too(folders):
    """Its rows depend on the images: of zeros they are right."""
    body = f"big = ReduceMax<keepdims = 0>(x) {constant('s', 1, 1)} more = Cast<to = 7>(big) t = Add(s, more)"
    replace_file(folders / "onnx", "model.onnx", onnx_graph(ANY, f"{body} out = Tile(x, t)"))
    run = open_export(folders / "onnx")
    assert run(np.zeros((3, 3, 32, 32), np.float32)).shape == (3, 5)
    with pytest.raises(
        InputError,
        match=r"gives float32 \[2, 10\] for 1 image of 5 classes, expected float32 \[1, 5\]",
    ):
        run(np.ones((1, 3, 32, 32), np.float32))


def test_logits_that_arent_finite_are_told_of_each_image(folders):
    # NaN of zeros
    replace_file(folders / "onnx", "model.onnx", onnx_graph(LOGITS, "logits = Div(x, x)"))
    black = np.zeros((9, 9, 3), np.uint8)  # as the model sees it -1, whose logarithm is NaN
    predictor = Predictor(folders / "onnx")
    assert [answer.outputs for answer in predictor.stream([black], workers=0)] == [[0, 1, 2, 3, 4]]
    replace_file(folders / "onnx", "model.onnx", onnx_graph(LOGITS, "logits = Log(x)"))
    predictor = Predictor(folders / "onnx")
    for predictor.task in ("classification", "multilabel"):
        answers = list(predictor.stream([black, black], workers=0))
        problems = [
            f"image {place}: the weights yield non-finite logits for it" for place in range(2)
        ]
        assert [answer.error for answer in answers] == problems


class Graph(nn.Layer):
    """A program that gives what ``output`` makes of logits [B, 5]; ``more``: it takes another
    input.
    """

    def __init__(self, output):
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, 5)
        self.output = output

    def forward(self, images, more=None):
        logits = self.head(images.flatten(1))
        return self.output(logits if more is None else logits + more)


def endless(logits):
    count = paddle.zeros([1], "int64")
    end = paddle.full([1], 1 << 60, "int64")
    while count < end:
        count = count + 1
        logits = logits + 0.0
    return logits


def put_program(folder, output, inputs=1):
    """Puts another program into an export's folder."""
    specs = [paddle.static.InputSpec([None, 3, 32, 32], "float32", "images")]
    specs += [paddle.static.InputSpec([1], "float32", "more")] * (inputs - 1)
    layer = Graph(output)
    layer.eval()
    paddle.jit.save(layer, str(folder / "inference"), input_spec=specs)
    for file in folder.glob("inference.*"):
        replace_file(folder, file.name, file.read_bytes())


@pytest.mark.parametrize(
    ("output", "inputs", "message"),
    [
        (
            lambda x: x.sum().reshape([1, 1, 1, 1]).expand([1, 1, 8, 8]),
            1,
            r"gives float32 \[1, 1, 8, 8\] for 2 images",
        ),
        (lambda x: x.sum(), 1, r"gives float32 \[\] for 2 images"),
        (lambda x: x.tile([1, 200_000]), 1, r"gives float32 \[2, 1000000\] for 2 images"),
        (lambda x: x.astype("int64"), 1, r"gives int64 \[2, 5\] for 2 images"),
        (lambda x: x.astype("complex64"), 1, r"gives complex64 \[2, 5\] for 2 images"),
        (lambda x: (x, x + 1), 1, "its graph's inputs are 1 and its outputs 2"),
        (lambda x: x, 2, "its graph's inputs are 2 and its outputs 1"),
        (lambda x: x.reshape([1, 5]), 1, "can't be read as an export of format paddle"),
        (lambda x: x.reshape([3, 5]), 1, "can't be read as an export of format paddle"),
    ],
)
def test_a_program_that_gives_no_logits_is_a_line(output, inputs, message, folders):
    put_program(folders / "paddle", output, inputs)
    with pytest.raises(
        InputError, match=f"paddle: .*{message}.*; export the model again"
    ) as caught:
        Predictor(folders / "paddle")
    assert "\n" not in str(caught.value)


def test_openvinos_graphs_are_held_to_the_same(folders):
    openvino = pytest.importorskip("openvino")
    given = openvino.opset8.parameter([-1, 3, 32, 32], np.float32)
    flat = openvino.opset8.reshape(given, np.array([-1, 4]), False)
    for outputs, message in (
        ([flat], r"gives float32 \[1536, 4\] for 2 images"),
        ([flat, flat], "its outputs 2"),
    ):
        openvino.save_model(
            openvino.Model(outputs, [given]),
            folders / "openvino" / "model.xml",
            compress_to_fp16=False,
        )
        for name in ("model.xml", "model.bin"):
            replace_file(folders / "openvino", name, (folders / "openvino" / name).read_bytes())
        with pytest.raises(InputError, match=message):
            open_export(folders / "openvino")


# ------------------------------------------------------------ what never ends


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with photographs/, a sound export and one whose program never ends."""
    root = tmp_path_factory.mktemp("place")
    photographs.write_photographs(root / "photographs", 3)
    trained = Predictor(photographs.write_weights(root / "model.safetensors"))
    for name in ("sound", "endless"):
        write_export(trained.config, trained.model, root / name, trained.classes)
    put_program(root / "endless", endless)
    return root


def predict(place, *words, **how):
    command = [warm.python(), str(ROOT / "tools" / "predict.py"), *map(str, words)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=place, **(streams | how))


def test_a_graph_that_never_ends_is_one_line_and_status_1(place):
    process = predict(
        place, "endless", "photographs/val", "-output=out.csv", "-o", "DIST.TIMEOUT", 3
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert (
        err
        == f"error: no progress in 3 s (DIST.TIMEOUT): rank 0 (process {_pid(err)}) is evaluating at step 0\n"
    )
    assert not [file.name for file in place.iterdir() if "out.csv" in file.name]


def _pid(err):
    return err.partition("(process ")[2].partition(")")[0]


# predict.py, which leaves a file ``running`` as its graph begins to run.
TELLING = f"""import pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from models.paddle_inference import Program
from tools import predict
run = Program.__call__
Program.__call__ = lambda *args: (pathlib.Path("running").touch(), run(*args))[1]
with predict.reporting():
    predict.main()
"""


def test_a_graph_that_never_ends_is_stopped_by_a_signal(place):
    words = [warm.python(), "-c", TELLING, "endless", "photographs/val"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words, cwd=place, start_new_session=True, **streams)
    wait_until((place / "running").exists)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err.count("\n")) == (128 + signal.SIGTERM, "", 1)
    assert "SIGTERM" in err


def test_a_sound_export_answers_as_its_weights_do_and_may_be_left(place):
    answers = []
    for name in ("sound", "model.safetensors"):
        out, err = predict(place, name, "photographs/val", "-format=csv").communicate(timeout=60)
        answers.append([line.rsplit(",", 3)[0] for line in out.splitlines()])
        assert err == ""
    assert answers[0] == answers[1]
    assert len(answers[0]) == 1 + 2 * 6
    (place / "many.txt").write_text("photographs/val/bridge/0.jpg\n" * 30_000)
    process = predict(place, "sound", "many.txt", "-top=1", "-workers=0")
    assert process.stdout.readline().split() == ["image", "probability", "class"]
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_reader_that_waits_is_no_graph_that_never_ends(place):
    # Far more than the pipe holds, a page.
    (place / "more.txt").write_text("photographs/val/bridge/0.jpg\n" * 600)
    process = predict(
        place, "sound", "more.txt", "-format=csv", "-workers=0", "-o", "DIST.TIMEOUT", 3
    )
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    assert process.stdout.readline() == "name,rank,output,class,probability,error\n"
    time.sleep(7)
    assert process.poll() is None  # it waits for its reader
    assert process.stdout.read().count("\n") == 2 * 600
    assert (process.wait(60), process.stderr.read()) == (0, "")
    process.stdout.close()
    process.stderr.close()


def test_who_takes_no_exports_refuses_them_before_they_run(place):
    with pytest.raises(
        InputError, match="endless is an export, which only gives logits; use the checkpoint"
    ):
        FeatureExtractor(place / "endless")
    for tool, words in (
        ("export_model.py", ["-pretrained=endless", "-output=again"]),
        ("visualize.py", ["attention", "endless", "photographs/val/bridge/0.jpg", "-output=a.png"]),
    ):
        command = [warm.python(), str(ROOT / "tools" / tool), *words]
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: endless is an export")
        assert done.stderr.count("\n") == 1


def test_a_server_whose_model_never_answers_ends(monkeypatch):
    monkeypatch.setattr(workers, "START_UP", 0.1)

    async def listen():
        pool = SimpleNamespace(
            settings=Settings("endless", timeout=0.05), about={}, ended=asyncio.Future()
        )
        pool._end = pool.ended.set_exception
        pool._handle = None
        pool._record_failed_load = lambda *words: workers.Pool._record_failed_load(pool, *words)
        await workers.Pool._receive(
            pool, SimpleNamespace(reader=asyncio.StreamReader(), load_failed=False)
        )
        return pool.ended.exception()

    error = asyncio.run(listen())
    assert isinstance(error, RunError)
    assert (
        str(error)
        == "the model didn't answer within 0.1 s after its start; raise -timeout if it is slow"
    )
