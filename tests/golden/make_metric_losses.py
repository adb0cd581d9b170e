"""Makes metric_losses.npz: losses and gradients of pytorch-metric-learning 2.9.0, in float64, and
its metrics of retrieval.

    PYTHONPATH=.:tests python tests/golden/make_metric_losses.py  # needs pytorch-metric-learning
"""

import sys
from pathlib import Path

import numpy as np

# Only the package's data sets need it, and it doesn't load beside a CPU torch.
sys.modules["torchvision"] = None

import torch  # noqa: E402
from pytorch_metric_learning.losses import (  # noqa: E402
    ArcFaceLoss,
    ProxyAnchorLoss,
    TripletMarginLoss,
)
from pytorch_metric_learning.miners import BatchHardMiner  # noqa: E402
from pytorch_metric_learning.reducers import DoNothingReducer  # noqa: E402
from pytorch_metric_learning.utils import accuracy_calculator  # noqa: E402

from golden.metric_problem import (  # noqa: E402
    ARCFACE,
    CLASSES,
    IMAGES,
    PROXY_ANCHOR,
    TRIPLET,
    WIDTH,
    problem,
)


def main() -> None:
    embeddings, vectors, labels = (torch.from_numpy(values) for values in problem())
    arrays = {}
    for margin, scale in ARCFACE:
        loss = ArcFaceLoss(
            CLASSES, WIDTH, np.degrees(margin), scale, reducer=DoNothingReducer()
        ).double()
        loss.W.data = vectors.double()
        x = embeddings.double().requires_grad_()
        values = loss(x, labels)["loss"]["losses"]
        values.sum().backward()
        arrays |= kept(f"arcface/{margin}/{scale}", values, x.grad, loss.W.grad)
    for margin, alpha in PROXY_ANCHOR:
        loss = ProxyAnchorLoss(CLASSES, WIDTH, margin, alpha).double()
        loss.proxies.data = vectors.double().T.contiguous()
        x = embeddings.double().requires_grad_()
        value = loss(x, labels)
        value.backward()
        arrays |= kept(f"proxy_anchor/{margin}/{alpha}", value, x.grad, loss.proxies.grad.T)
    for margin in TRIPLET:
        loss = TripletMarginLoss(
            margin=margin or 0.0, smooth_loss=margin is None, reducer=DoNothingReducer()
        )
        x = embeddings.double().requires_grad_()
        mined = BatchHardMiner()(x, labels)
        values = loss(x, labels, mined)["loss"]["losses"]
        values.sum().backward()
        each = torch.zeros(IMAGES, dtype=torch.float64)
        each[mined[0]] = values.detach()
        arrays |= kept(f"triplet/{margin}", each, x.grad)
    arrays |= metrics(embeddings, labels)
    np.savez_compressed(Path(__file__).with_name("metric_losses.npz"), **arrays)


def kept(name: str, *tensors: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns a loss's values, and its gradients of the embeddings and of the classes' vectors."""
    names = (name, f"{name}/embeddings", f"{name}/vectors")
    return {key: tensor.detach().numpy() for key, tensor in zip(names, tensors, strict=False)}


class Exact:
    """Finds all neighbours by their cosine in float64, so that FAISS isn't needed."""

    def __call__(self, query, k, reference, ref_includes_query=False):
        query = torch.nn.functional.normalize(query.double())
        cosines = query @ torch.nn.functional.normalize(reference.double()).T
        found = cosines.topk(min(k + ref_includes_query, len(reference)))
        first = int(ref_includes_query)
        return found.values[:, first:], found.indices[:, first:]


def metrics(embeddings: torch.Tensor, labels: torch.Tensor) -> dict[str, np.ndarray]:
    """Returns mean average precision, with and without a limit at R."""
    names = ("mean_average_precision", "mean_average_precision_at_r", "precision_at_1")
    calculator = accuracy_calculator.AccuracyCalculator(
        include=names, k=len(labels) - 1, knn_func=Exact(), device=torch.device("cpu")
    )
    found = calculator.get_accuracy(embeddings, labels)
    return {name: np.array(found[name]) for name in names}


if __name__ == "__main__":
    main()
