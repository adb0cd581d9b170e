"""What happens after training: a trained model predicts, is exported, served and looked at."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inference.predictor import Failure, Prediction, Predictor

__all__ = ["Failure", "Prediction", "Predictor"]


def __getattr__(name: str) -> Any:
    """Imports a Predictor, and Paddle with it, once it is asked for: a server's HTTP process needs
    neither.
    """
    if name not in __all__:
        raise AttributeError(f"module 'inference' has no attribute {name!r}")
    from inference import predictor

    return getattr(predictor, name)
