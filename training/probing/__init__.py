"""What frozen features are worth: classifiers of them that are cheap to fit, and signs of a collapse."""
