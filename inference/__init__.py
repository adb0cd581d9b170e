"""Uses of a trained model: predictions, exports, a server, and pictures that explain it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.predictor import Failure, Prediction, Predictor

__all__ = ["Failure", "Prediction", "Predictor"]


def __getattr__(name: str) -> Any:
    """Imports the Predictor when it is first used: a server's HTTP process needs no Paddle."""
    if name not in __all__:
        raise AttributeError(f"module 'inference' has no attribute {name!r}")
    from inference import predictor

    return getattr(predictor, name)
