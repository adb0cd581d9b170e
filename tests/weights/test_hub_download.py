"""Weights of the Hub by a model's name, from a server that stands for it: found, cached, absent,
silent.
"""

import http.server
import json
import socket
import subprocess
import threading

import numpy as np
import pytest
import warm
from conftest import ROOT
from safetensors.numpy import save

from models import create_model
from weights import file_arrays

pytest.importorskip("huggingface_hub", reason="the extra hub isn't installed")

SIZES = {"embed_dim": 16, "depth": 1, "num_heads": 2}
CONFIG = {
    "architecture": "vit_tiny_patch16_224", "num_classes": 3,
    "pretrained_cfg": {"tag": "augreg_in21k_ft_in1k", "input_size": [3, 32, 32], "num_classes": 3},
}  # fmt: skip
DEFAULT = "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"  # timm's, where no tag is given
ASK = """
import json, sys, time, warnings
import paddle
from errors import InputError
from models import create_model
warnings.simplefilter("always")
for line in sys.stdin:
    name, arguments = json.loads(line)
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        try:
            model = create_model(name, **arguments)
            head = model.head.weight if hasattr(model.head, "weight") else None
            told = [float(model.patch_embed.proj.weight.sum()), head is not None and head.shape[1]]
            told += [float(head.sum())] if head is not None else []
        except InputError as error:
            told = str(error)
    said = [str(one.message) for one in said if "are new" in str(one.message)]
    print(json.dumps([told, said, time.monotonic() - start]), flush=True)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does about the files of ``server.files``, by repository and name."""

    def answer(self, body):
        path = self.path.lstrip("/").split("/")
        repository = "/".join(path[:2])
        file = path[-1]
        self.server.asked.append((self.command, repository, file))
        content = self.server.files.get((repository, file))
        if content is None:
            known = any(repository == one for one, _ in self.server.files)
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        for name, value in {"X-Repo-Commit": "0" * 40, "ETag": f'"{file}-{len(content)}"'}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    model = create_model(
        "vit_tiny_patch16_224", num_classes=3, image_size=32, head_init_scale=1.0, **SIZES
    )
    weights = save(
        {name: np.ascontiguousarray(array) for name, array in file_arrays(model).items()}
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files = {
        (DEFAULT, "model.safetensors"): weights,
        (DEFAULT, "config.json"): json.dumps(CONFIG).encode(),
    }
    server.asked = []
    server.model = model
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def asked(questions, home, endpoint, **more):
    """What ``create_model`` gives for [(name, arguments)]: (values or the error, warnings, seconds)
    of each.
    """
    environment = (
        warm.environment()
        | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)}
        | more
    )
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"}
    words = "".join(json.dumps(question) + "\n" for question in questions)
    done = subprocess.run(
        [warm.python(), "-c", ASK],
        input=words,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_true_loads_timms_weights_of_the_name(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    small = {"pretrained": True, "img_size": 32, **SIZES}
    questions = [
        ("vit_tiny_patch16_224", small),
        ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", small),
        ("vit_tiny_patch16_224", small | {"num_classes": 3, "drop_path_rate": 0.1}),
        ("vit_tiny_patch16_224", small | {"num_classes": 7}),
        ("vit_tiny_patch16_224", small | {"num_classes": 0}),
        ("vit_tiny_patch16_224.augreg_in21k", small),
        ("vit_digits", {"pretrained": True}),
    ]
    found, _ = asked(questions, tmp_path, endpoint)
    stem, head = (
        float(weight.sum()) for weight in (hub.model.patch_embed.proj.weight, hub.model.head.weight)
    )
    for told, said, _ in found[:3]:
        assert told == [pytest.approx(stem, abs=1e-4), 3, pytest.approx(head, abs=1e-4)]
        assert said == []
    told, [said], _ = found[3]
    assert told[:2] == [pytest.approx(stem, abs=1e-4), 7]
    assert said.startswith(
        "head.weight, head.bias are new: 3 classes in the file, 7 in the model ("
    )
    assert found[4][0] == [pytest.approx(stem, abs=1e-4), False]
    assert found[5][0].startswith("hf-hub:timm/vit_tiny_patch16_224.augreg_in21k: ")
    assert "can't be downloaded (404 Client Error" in found[5][0]
    assert found[6][0] == "timm has no weights of vit_digits; pass pretrained=FILE, or leave it out"
    # From the cache, when the Hub has gone; what is absent there is one line.
    gone, errors = asked([questions[0], questions[5]], tmp_path, "http://127.0.0.1:1")
    assert gone[0][0] == found[0][0]
    assert "can't be downloaded (" in gone[1][0]
    assert (
        f"and isn't in {tmp_path}/hub; set HF_ENDPOINT to a mirror, HF_HOME to a filled cache"
        in gone[1][0]
    )
    assert sum(seconds for *_, seconds in gone) < 10
    assert "Retrying" not in errors
    offline, _ = asked(questions[:1], tmp_path, endpoint, HF_HUB_OFFLINE="1")
    assert offline[0][0] == found[0][0]


def test_a_hub_that_is_silent_costs_seconds_once(tmp_path):
    """It takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        question = ("vit_tiny_patch16_224", {"pretrained": True})
        (first, again), errors = asked([question, question], tmp_path, endpoint)
    for told, _, _ in (first, again):
        assert told.startswith(f"hf-hub:{DEFAULT}: ")
        assert "can't be downloaded (" in told
    assert first[2] < 12  # 8 s, and what a busy machine adds
    assert again[2] < 4
    assert "Retrying" not in errors
