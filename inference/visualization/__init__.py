"""Pictures of what a model sees: attention, maps of classes, features, positions, predictions."""

from inference.visualization.maps import overlay

__all__ = ["overlay"]
