"""Pictures that explain a model: attention, class activation maps, features, positions, predictions."""

from inference.visualization.maps import overlay

__all__ = ["overlay"]
