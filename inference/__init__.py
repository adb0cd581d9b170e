"""What happens after training: a trained model predicts, is exported, served and looked at."""

from inference.predictor import Failure, Prediction, Predictor

__all__ = ["Failure", "Prediction", "Predictor"]
